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

// lowerMTU limits the path MTU of the connection to Config.PathMTU. The manager puts it in
// the request, and the peer uses it too. A route can only be set in place of its
// resolution. To keep everything else that rdma_cm has found (priority, traffic class, hop
// limit), a new ID gets the route of the first ID with a smaller MTU, and takes its place.
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
	C.rn_destroy_id(old) // The port of the old ID is free then.
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
