//go:build linux && cgo

package rdmacore

// #include "shim.h"
import "C"

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/rdmanet/rdmanet/ibv"
)

// This file has what is different for datagrams, in the port space of UDP. The connection
// managers exchange one request and one reply (SIDR), and the queue pair does not belong to
// one peer.

const portSpaceUDP = 0x0111

// Types of queue pairs in infiniband/verbs.h.
const (
	typeRC = 2
	typeUD = 4
)

// privateUD is the length of the private data of a reply in SIDR. A request has more: 216
// bytes, of which rdma_cm uses 36.
const privateUD = 136

// errNoUD is the error of a device without datagrams.
func (d *device) errNoUD() error { return ibv.Unsupported(d.name, "datagrams (UD queue pairs)") }

// BindUD returns an ID of the device that has the address.
func (p *Provider) BindUD(ctx context.Context, local netip.AddrPort) (ibv.ID, error) {
	i, err := p.bindUD(ctx, local)
	if err != nil {
		return nil, fmt.Errorf("%s: bind %v for datagrams: %w", Name, local, listenError(local.Addr(), err))
	}
	return i, nil
}

func (p *Provider) bindUD(ctx context.Context, local netip.AddrPort) (*id, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if !local.Addr().IsValid() || local.Addr().IsUnspecified() {
		return nil, fmt.Errorf("it takes the address of a device: %w", syscall.EINVAL)
	}
	i, err := p.newID(portSpaceUDP)
	if err != nil {
		return nil, err
	}
	addr := toSockaddr(local)
	err = errno(C.rn_bind_addr(i.c, addr.pointer()))
	if err == nil {
		err = i.find()
	}
	if err != nil {
		i.Close()
		return nil, err
	}
	return i, nil
}

// ResolveUD returns an ID of the device on the route to remote.
func (p *Provider) ResolveUD(ctx context.Context, local, remote netip.AddrPort) (ibv.ID, error) {
	i, err := p.resolve(ctx, portSpaceUDP, local, remote)
	if err != nil {
		return nil, fmt.Errorf("%s: resolve %v for datagrams: %w", Name, remote, err)
	}
	return i, nil
}

// ListenUD binds an address for rdma_cm, as Listen does.
func (p *Provider) ListenUD(ctx context.Context, local netip.AddrPort, backlog int) (ibv.Listener, error) {
	l, err := p.listen(portSpaceUDP, local, backlog)
	if err != nil {
		return nil, fmt.Errorf("%s: listen on %v for datagrams: %w", Name, local, listenError(local.Addr(), err))
	}
	return l, nil
}

// checkUD refuses to listen on a device without datagrams. rdma_cm would listen, and siw
// would accept TCP connections there.
func (p *Provider) checkUD(c *C.struct_rn_cm_id) error {
	if c.verbs != nil {
		d, err := p.lib.device(c.verbs)
		if err == nil && !d.attr.Caps.Has(ibv.CapUD) {
			err = d.errNoUD()
		}
		return err
	}
	devs, err := p.lib.list()
	if err != nil {
		return err
	}
	for _, d := range devs {
		if d.attr.Caps.Has(ibv.CapUD) {
			return nil
		}
	}
	return devs[0].errNoUD()
}

// udParam returns what an event says about the peer.
func udParam(info *C.struct_rn_event_info) ibv.UDParam {
	a := &info.ah_attr
	return ibv.UDParam{
		QPN:  uint32(info.qp_num),
		QKey: uint32(info.qkey),
		AH: ibv.AHAttr{
			Port:         int(a.port_num),
			Global:       a.is_global != 0,
			GID:          *(*ibv.GID)(unsafe.Pointer(&a.dgid)),
			SGIDIndex:    uint8(a.sgid_index),
			FlowLabel:    uint32(a.flow_label),
			HopLimit:     uint8(a.hop_limit),
			TrafficClass: uint8(a.traffic_class),
			DLID:         uint16(a.dlid),
			SL:           uint8(a.sl),
			SrcPathBits:  uint8(a.src_path_bits),
			StaticRate:   uint8(a.static_rate),
		},
	}
}

func (i *id) UDParam() ibv.UDParam {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.peer
}

// PathMTU is the path MTU of the queue pair for a connection. For datagrams it is that of
// the route, but the port's MTU at most.
func (i *id) PathMTU() int {
	i.mu.Lock()
	defer i.mu.Unlock()
	switch {
	case i.closed || i.dev.attr.Transport == ibv.TransportIWARP:
		return 0
	case i.ud:
		port, err := i.dev.mtu(i.port)
		if route := mtu(C.uint32_t(C.rn_path_mtu(i.c))); route != 0 {
			port = min(port, route)
		}
		if err != nil {
			return 0
		}
		return port
	case i.qp == nil:
		return 0
	}
	return mtu(C.uint32_t(max(C.rn_qp_path_mtu(i.c.qp), 0)))
}

// mtu returns the port's present MTU.
func (d *device) mtu(port int) (int, error) {
	var a C.struct_rn_port_attr
	if err := errno(C.rn_query_port(d.c, C.int(port), &a)); err != nil {
		return 0, err
	}
	return mtu(a.active_mtu), nil
}

// mtu returns the size for a number of enum ibv_mtu, 0 for other numbers.
func mtu(n C.uint32_t) int {
	if int(n) < len(mtus) {
		return mtus[n]
	}
	return 0
}

// connectUD sends a request to the peer's manager for the queue pair that serves the
// address.
func (i *id) connectUD(ctx context.Context, param *ibv.ConnParam) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := i.ask(param, false, func(c *C.struct_rn_conn_param, private unsafe.Pointer, n C.int) C.int {
		return C.rn_connect(i.c, c, private, n)
	}); err != nil {
		return err
	}
	s, err := i.next(ctx, cmEstablished)
	if err != nil {
		return err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.private, i.peer = s.private, s.peer
	return nil
}

// acceptUD replies with a queue pair. There is nothing to wait for.
func (i *id) acceptUD(ctx context.Context, param *ibv.ConnParam) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return i.ask(param, true, func(c *C.struct_rn_conn_param, private unsafe.Pointer, n C.int) C.int {
		return C.rn_accept(i.c, c, private, n)
	})
}

// ask calls f, which sends a request or a reply. An ID does that only once.
func (i *id) ask(param *ibv.ConnParam, answer bool, f func(*C.struct_rn_conn_param, unsafe.Pointer, C.int) C.int) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	switch {
	case i.closed:
		return net.ErrClosed
	case i.up || i.passive != answer || !i.remote.IsValid():
		return ibv.ErrState
	case answer && i.qp == nil && param.QPN == 0: // Queue pair 0 is that of the subnet's management.
		return fmt.Errorf("no queue pair: %w", ibv.ErrState)
	case len(param.Private) > privateUD:
		return i.tooPrivate(param.Private)
	}
	i.up = true
	c := C.struct_rn_conn_param{qp_num: C.uint32_t(param.QPN)}
	return errno(f(&c, dataOf(param.Private), C.int(len(param.Private))))
}

// maxPrivate returns how many bytes of private data the ID can send.
func (i *id) maxPrivate() int {
	if i.ud {
		return i.dev.attr.MaxPrivateDataUD
	}
	return i.dev.attr.MaxPrivateData
}

func (i *id) tooPrivate(private []byte) error {
	return fmt.Errorf("%d bytes of private data (limit %d): %w", len(private), i.maxPrivate(), ibv.ErrLimit)
}

// These are the failures of SIDR, in Linux's enum ib_cm_sidr_status.
var sidrReasons = map[int]string{
	sidrUnsupported: "nobody listens there",
	sidrRejected:    "refused by its program",
	3:               "no queue pair available",
	4:               "served elsewhere",
	5:               "unsupported version",
}

const (
	sidrUnsupported = 1
	sidrRejected    = 2
)

// refusedUD is like rejected, for datagrams. The manager reports every failure as
// unreachable.
func refusedUD(s step) error {
	text := sidrReasons[s.status]
	if text == "" {
		text = fmt.Sprintf("reason %d", s.status)
	}
	if s.status == sidrUnsupported {
		return fmt.Errorf("%w: %s", syscall.ECONNREFUSED, text)
	}
	return &ibv.RejectError{Reason: s.status, Private: s.private, Text: text, Err: syscall.ECONNREFUSED}
}

// ah implements ibv.AH. The library frees a handle at once. So a handle that is closed is
// kept until the posts in progress that name it have returned.
type ah struct {
	pd     *pd
	c      unsafe.Pointer
	closed atomic.Bool
	users  atomic.Int32 // users counts those posts, and one more until Close.
}

func (p *pd) CreateAH(attr ibv.AHAttr) (ibv.AH, error) {
	if attr.Port < 1 || attr.Port > p.dev.attr.Ports {
		return nil, fmt.Errorf("%s: create address handle: port %d of %d: %w", p.dev.name, attr.Port, p.dev.attr.Ports, syscall.EINVAL)
	}
	c := C.struct_rn_ah_attr{
		flow_label:    C.uint32_t(attr.FlowLabel),
		sgid_index:    C.uint8_t(attr.SGIDIndex),
		hop_limit:     C.uint8_t(attr.HopLimit),
		traffic_class: C.uint8_t(attr.TrafficClass),
		dlid:          C.uint16_t(attr.DLID),
		sl:            C.uint8_t(attr.SL),
		src_path_bits: C.uint8_t(attr.SrcPathBits),
		static_rate:   C.uint8_t(attr.StaticRate),
		port_num:      C.uint8_t(attr.Port),
	}
	if attr.Global {
		c.is_global = 1
		*(*ibv.GID)(unsafe.Pointer(&c.dgid)) = attr.GID
	}
	return p.createAH(func(a *unsafe.Pointer) C.int { return C.rn_create_ah(p.c, &c, a) })
}

func (p *pd) CreateAHFromWC(port int, wc *ibv.WC, grh []byte) (ibv.AH, error) {
	if port < 1 || port > p.dev.attr.Ports {
		return nil, fmt.Errorf("%s: create address handle: port %d of %d: %w", p.dev.name, port, p.dev.attr.Ports, syscall.EINVAL)
	}
	c := C.struct_rn_wc{
		src_qp:         C.uint32_t(wc.SrcQP),
		slid:           C.uint16_t(wc.SLID),
		sl:             C.uint8_t(wc.SL),
		dlid_path_bits: C.uint8_t(wc.DLIDPathBits),
	}
	var header [ibv.GRHLen]byte
	if wc.Flags&ibv.WCGRH != 0 {
		c.wc_flags = wcGRH
		if copy(header[:], grh) < len(header) {
			return nil, fmt.Errorf("%s: create address handle: a header of %d bytes: %w", p.dev.name, len(grh), syscall.EINVAL)
		}
	}
	return p.createAH(func(a *unsafe.Pointer) C.int {
		return C.rn_create_ah_from_wc(p.c, &c, unsafe.Pointer(&header), C.int(port), a)
	})
}

func (p *pd) createAH(create func(*unsafe.Pointer) C.int) (ibv.AH, error) {
	if !p.dev.attr.Caps.Has(ibv.CapUD) {
		return nil, p.dev.errNoUD()
	}
	if err := p.use(); err != nil {
		return nil, fmt.Errorf("%s: create address handle: %w", p.dev.name, err)
	}
	a := &ah{pd: p}
	a.users.Store(1)
	var c unsafe.Pointer
	if err := errno(create(&c)); err != nil {
		p.unuse()
		return nil, fmt.Errorf("%s: create address handle: %w", p.dev.name, err)
	}
	a.c = c
	return a, nil
}

// hold keeps the handle until release. It returns false if the handle is closed.
func (a *ah) hold() bool {
	for !a.closed.Load() {
		n := a.users.Load()
		if n > 0 && a.users.CompareAndSwap(n, n+1) {
			return true
		}
	}
	return false
}

func (a *ah) release() error {
	if a.users.Add(-1) != 0 {
		return nil
	}
	err := errno(C.rn_destroy_ah(a.c))
	a.pd.unuse()
	return err
}

func (a *ah) Close() error {
	if a.closed.Swap(true) {
		return net.ErrClosed
	}
	if err := a.release(); err != nil {
		return fmt.Errorf("%s: close address handle: %w", a.pd.dev.name, err)
	}
	return nil
}

// address sets the destination of a datagram in a request.
func (q *qp) address(wr *ibv.SendWR, w *C.struct_rn_wr) error {
	if wr.Op != ibv.OpSend && wr.Op != ibv.OpSendImm {
		return fmt.Errorf("%v of datagrams: %w", wr.Op, syscall.EINVAL)
	}
	a, ok := wr.AH.(*ah)
	if !ok || a.pd != q.pd {
		return fmt.Errorf("address handle of another protection domain: %w", syscall.EINVAL)
	}
	if !a.hold() {
		return fmt.Errorf("address handle: %w", net.ErrClosed)
	}
	q.sq.ahs = append(q.sq.ahs, a)
	w.remote_addr = C.uint64_t(uintptr(a.c))
	w.rkey = C.uint32_t(wr.RemoteQPN)
	w.qkey = C.uint32_t(wr.RemoteQKey)
	return nil
}

// releaseAHs releases the handles that address has held.
func (s *queue) releaseAHs() {
	for _, a := range s.ahs {
		a.release() // If the program has closed it, its Close has returned already.
	}
	clear(s.ahs)
	s.ahs = s.ahs[:0]
}

// addSource sets the source of a datagram in its completion. Devices set some of these
// fields for connections too; Soft-RoCE sets the flag.
func (c *cq) addSource(w *C.struct_rn_wc, wc *ibv.WC) {
	if wc.Status != ibv.WCSuccess || wc.Op != ibv.WCRecv {
		return
	}
	if c.connections {
		if q := c.qps[wc.QPN]; q == nil || !q.ud {
			return
		}
	}
	wc.SrcQP, wc.SLID, wc.SL, wc.DLIDPathBits = uint32(w.src_qp), uint16(w.slid), uint8(w.sl), uint8(w.dlid_path_bits)
	if w.wc_flags&wcGRH != 0 {
		wc.Flags |= ibv.WCGRH
	}
}
