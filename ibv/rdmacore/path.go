//go:build linux && cgo

package rdmacore

// #include "shim.h"
import "C"

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/rdmanet/rdmanet/ibv"
)

// lowerMTU has the connection use no more than Config.PathMTU, which the manager
// puts in its request and the peer's goes by. A route can only be given in place
// of resolving it. So that all else in it is what rdma_cm finds (priority, traffic
// class, hop limit), the ID that has found it makes way for another that is given
// the same with a smaller MTU.
func (i *id) lowerMTU(ctx context.Context, localPort uint16) error {
	want := i.p.cfg.PathMTU
	if want == 0 || i.ud || i.dev.attr.Transport == ibv.TransportIWARP || mtu(C.uint32_t(C.rn_path_mtu(i.c))) <= want {
		return nil
	}
	rec := *i.c.path_rec
	var c *C.struct_rn_cm_id
	if err := errno(C.rn_create_id(i.p.lib.channel, i.handle, portSpaceTCP, &c)); err != nil {
		return err
	}
	i.mu.Lock()
	old, local := i.c, netip.AddrPortFrom(i.local.Addr(), localPort)
	i.c = c
	i.mu.Unlock()
	C.rn_destroy_id(old) // whose port is free again
	if err := i.resolveAddr(ctx, local); err != nil {
		return err
	}
	if err := i.find(); err != nil {
		return err
	}
	if err := errno(C.rn_set_path(i.c, &rec, C.int(slices.Index(mtus[:], want)))); err != nil {
		return fmt.Errorf("set the path MTU to %d: %w", want, err)
	}
	_, err := i.next(ctx, cmRouteResolved)
	return err
}
