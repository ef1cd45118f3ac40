//go:build linux && cgo

package rdmacore

// #include "shim.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/rdmanet/rdmanet/ibv"
)

// Events of enum rdma_cm_event_type.
const (
	cmAddrResolved   = 0
	cmAddrError      = 1
	cmRouteResolved  = 2
	cmRouteError     = 3
	cmConnectRequest = 4
	cmConnectError   = 6
	cmUnreachable    = 7
	cmRejected       = 8
	cmEstablished    = 9
	cmDisconnected   = 10
	cmDeviceRemoval  = 11
	cmMulticastJoin  = 12
	cmMulticastError = 13
)

const (
	portSpaceTCP = 0x0106

	// Options of rdma_set_option(3), level RDMA_OPTION_ID.
	optionTOS        = 0
	optionAFOnly     = 2
	optionAckTimeout = 3

	// resolveTimeout bounds each of the two steps of Resolve if the context has no earlier
	// deadline.
	resolveTimeout = 5 * time.Second

	defaultRNRTimer = 640 * time.Microsecond
)

// watch passes the connection manager's events to the IDs that they concern, as long as the
// process lives.
func (lib *library) watch(f *os.File) {
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	var info C.struct_rn_event_info
	raw.Read(func(uintptr) bool {
		for {
			lib.events.Lock()
			rc := C.rn_cm_event(lib.channel, &info)
			lib.events.Unlock()
			switch rc {
			case 0:
				lib.event(&info)
			case -C.int(syscall.EAGAIN):
				return false
			default: // of one connection, whose program hears of it otherwise
				time.Sleep(time.Millisecond) // in case it fails for ever
			}
		}
	})
}

func (lib *library) event(info *C.struct_rn_event_info) {
	if info.event == cmConnectRequest {
		l, ok := lookup(info.listen_handle).(*listener)
		if !ok {
			C.rn_destroy_id(info.id) // which rejects
			return
		}
		l.request(info)
		return
	}
	switch o := lookup(info.handle).(type) {
	case *id:
		o.managed(info)
	case *listener:
		if info.event == cmDeviceRemoval {
			o.lost.Do(func() { close(o.gone) })
		}
	}
}

// id implements ibv.ID.
type id struct {
	p       *Provider
	dev     *device
	handle  C.uintptr_t
	port    int
	remote  netip.AddrPort
	passive bool
	ud      bool // ud is set in the port space of UDP.

	steps       chan step // steps has the events of the set-up.
	established bool      // established is set by an event. Only the goroutine that takes events uses it.

	// calling is held while C sets the connection up, which on siw waits for TCP. It is
	// locked before mu.
	calling sync.Mutex

	mu      sync.Mutex
	c       *C.struct_rn_cm_id
	local   netip.AddrPort
	qp      *qp
	private []byte
	param   ibv.ConnParam
	peer    ibv.UDParam
	groups  groups
	closed  bool
	ended   bool // ended is set when the manager has reported the end.
	up      bool
	handler func(ibv.Event)
	past    []ibv.Event // past has one event of each kind.
}

// step is an event of the set-up.
type step struct {
	event   int
	status  int
	private []byte
	param   ibv.ConnParam
	peer    ibv.UDParam
}

func (p *Provider) newID(portSpace C.int) (*id, error) {
	i := &id{p: p, ud: portSpace == portSpaceUDP, steps: make(chan step, 8)}
	i.handle = addHandle(i)
	if err := errno(C.rn_create_id(p.lib.channel, i.handle, portSpace, &i.c)); err != nil {
		removeHandle(i.handle)
		return nil, err
	}
	return i, nil
}

// Resolve finds the device that routes to remote.
func (p *Provider) Resolve(ctx context.Context, local, remote netip.AddrPort) (ibv.ID, error) {
	i, err := p.resolve(ctx, portSpaceTCP, local, remote)
	if err != nil {
		return nil, fmt.Errorf("%s: resolve %v: %w", Name, remote, err)
	}
	return i, nil
}

func (p *Provider) resolve(ctx context.Context, portSpace C.int, local, remote netip.AddrPort) (*id, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if !remote.Addr().IsValid() || remote.Port() == 0 {
		return nil, syscall.EADDRNOTAVAIL
	}
	i, err := p.newID(portSpace)
	if err != nil {
		return nil, err
	}
	i.remote = remote
	err = i.route(ctx, local)
	if err == nil {
		err = i.lowerMTU(ctx, local.Port())
	}
	if err != nil {
		i.Close()
		return nil, err
	}
	return i, nil
}

func (i *id) route(ctx context.Context, local netip.AddrPort) error {
	if err := i.resolveAddr(ctx, local); err != nil {
		return err
	}
	if err := i.find(); err != nil {
		return err
	}
	if err := errno(C.rn_resolve_route(i.c, timeoutOf(ctx))); err != nil {
		return routeError(err)
	}
	_, err := i.next(ctx, cmRouteResolved)
	return routeError(err)
}

// resolveAddr is the first step of route, after which the device is known.
func (i *id) resolveAddr(ctx context.Context, local netip.AddrPort) error {
	if err := i.setOptions(); err != nil {
		return err
	}
	var src unsafe.Pointer
	from, to := toSockaddr(local), toSockaddr(i.remote)
	if local.IsValid() {
		src = from.pointer()
	}
	if err := errno(C.rn_resolve_addr(i.c, src, to.pointer(), timeoutOf(ctx))); err != nil {
		return routeError(err)
	}
	_, err := i.next(ctx, cmAddrResolved)
	return routeError(err)
}

// routeError explains the error if there is no route by RDMA. For the loopback interface,
// for instance, the manager returns "invalid argument".
func routeError(err error) error {
	if errors.Is(err, syscall.ENODEV) || errors.Is(err, syscall.EINVAL) {
		return fmt.Errorf("no RDMA device on the interface that leads there: %w", err)
	}
	return err
}

// find reads what the library knows of the connection by now.
func (i *id) find() error {
	if i.c.verbs == nil {
		return syscall.ENODEV
	}
	dev, err := i.p.lib.device(i.c.verbs)
	if err != nil {
		return err
	}
	if want := i.p.cfg.Device; want != "" && want != dev.name {
		return fmt.Errorf("the way there is by device %q, not %q: %w", dev.name, want, syscall.ENODEV)
	}
	if i.ud && !dev.attr.Caps.Has(ibv.CapUD) {
		return dev.errNoUD()
	}
	i.mu.Lock() // Events of the device may use the ID already.
	defer i.mu.Unlock()
	i.dev = dev
	i.port = int(i.c.port_num)
	i.local = fromSockaddr(&i.c.src_storage)
	return nil
}

func (i *id) setOptions() error {
	cfg := &i.p.cfg
	if cfg.TypeOfService != 0 {
		if err := errno(C.rn_set_option(i.c, optionTOS, C.int(cfg.TypeOfService))); err != nil {
			return fmt.Errorf("set the type of service: %w", err)
		}
	}
	return i.setAckTimeout()
}

// setAckTimeout is for both sides, each of which has its own.
func (i *id) setAckTimeout() error {
	d := i.p.cfg.AckTimeout
	if d == 0 || i.ud {
		return nil
	}
	if err := errno(C.rn_set_option(i.c, optionAckTimeout, C.int(ackTimeout(d)))); err != nil {
		return fmt.Errorf("set the time to wait for acknowledgements: %w", err)
	}
	return nil
}

// timeoutOf returns how long ctx lasts, in milliseconds, but resolveTimeout at most.
func timeoutOf(ctx context.Context) C.int {
	d := resolveTimeout
	if deadline, ok := ctx.Deadline(); ok {
		d = min(d, time.Until(deadline))
	}
	return C.int(max(d.Milliseconds(), 1))
}

// managed handles an event of the connection manager.
func (i *id) managed(info *C.struct_rn_event_info) {
	switch info.event {
	case cmDisconnected:
		var err error
		if info.status != 0 {
			err = statusError(int(info.status))
		}
		i.overtaken()
		i.disconnected(err)
	case cmDeviceRemoval:
		i.event(ibv.Event{Kind: ibv.EventDeviceRemoval, Err: syscall.ENODEV})
		i.step(step{event: cmDeviceRemoval})
		i.ungrouped()
	case cmRejected, cmConnectError, cmUnreachable:
		if i.established {
			// The peer has given up before it knew that its answer had arrived.
			i.disconnected(i.stepError(newStep(info)))
			return
		}
		i.step(newStep(info))
	case cmEstablished:
		i.established = true
		i.step(newStep(info))
	case cmAddrResolved, cmAddrError, cmRouteResolved, cmRouteError:
		i.step(newStep(info))
	case cmMulticastJoin, cmMulticastError:
		i.grouped(uintptr(info.group), newStep(info))
	}
}

// overtaken is called on the passive side when the peer has disconnected. A peer
// disconnects only from a connection that is established for it, so the answer to its
// request has arrived. The message that establishes the connection for this side is late,
// or was lost. The peer's data has arrived, and the program must get it.
func (i *id) overtaken() {
	if !i.passive || i.established {
		return
	}
	i.mu.Lock()
	answered := i.up
	i.mu.Unlock()
	if answered {
		i.established = true
		i.step(step{event: cmEstablished})
	}
}

func newStep(info *C.struct_rn_event_info) step {
	return step{
		event:   int(info.event),
		status:  int(info.status),
		private: slices.Clone(unsafe.Slice((*byte)(&info.private_data[0]), int(info.private_len))),
		// rdma_get_cm_event(3): the peer sees the two depths the other way round.
		param: ibv.ConnParam{ResponderResources: int(info.responder_resources), InitiatorDepth: int(info.initiator_depth)},
		peer:  udParam(info),
	}
}

func (i *id) step(s step) {
	select {
	case i.steps <- s:
	default: // The set-up is over.
	}
}

// next waits for an event of the set-up, which should be want.
func (i *id) next(ctx context.Context, want int) (step, error) {
	select {
	case s := <-i.steps:
		if s.event == want {
			return s, nil
		}
		return s, i.stepError(s)
	case <-ctx.Done():
		return step{}, ctx.Err()
	}
}

func (i *id) stepError(s step) error {
	switch s.event {
	case cmRejected:
		return i.rejected(s)
	case cmDeviceRemoval:
		return syscall.ENODEV
	case cmUnreachable:
		if s.status > 0 && i.ud {
			return refusedUD(s)
		}
		if s.status >= 0 {
			return syscall.ETIMEDOUT
		}
	}
	if s.status == 0 {
		return fmt.Errorf("unexpected event %d of the connection manager", s.event)
	}
	return statusError(s.status)
}

// These are reasons for a reject in InfiniBand's CM, volume 1, section 12.6.7.2.
var rejectReasons = map[int]string{
	1:  "no queue pair available",
	3:  "no resources available",
	4:  "it timed out",
	5:  "unsupported request",
	8:  "nobody listens there",
	10: "stale connection",
	28: "refused by its program",
}

const (
	rejectNoService = 8
	rejectConsumer  = 28
)

// rejected distinguishes a refusal by the peer's program from a port where nobody listens.
// On iWARP Linux reports a refusal as a reset.
func (i *id) rejected(s step) error {
	if s.status == rejectNoService {
		return fmt.Errorf("%w: %s", syscall.ECONNREFUSED, rejectReasons[s.status])
	}
	text := rejectReasons[s.status]
	switch {
	case s.status == -int(syscall.ECONNRESET):
		text = rejectReasons[rejectConsumer]
	case s.status < 0:
		return statusError(s.status)
	case text == "":
		text = fmt.Sprintf("reason %d", s.status)
	}
	return &ibv.RejectError{Reason: max(s.status, 0), Private: s.private, Text: text, Err: syscall.ECONNREFUSED}
}

// statusError returns the error for the status of an event.
func statusError(status int) error {
	if status < 0 {
		return syscall.Errno(-status)
	}
	return fmt.Errorf("connection manager: status %d", status)
}

func (i *id) Device() ibv.Device         { return i.dev }
func (i *id) Port() int                  { return i.port }
func (i *id) RemoteAddr() netip.AddrPort { return i.remote }

func (i *id) LocalAddr() netip.AddrPort {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.local
}

func (i *id) PrivateData() []byte {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.private
}

// MaySendFirst is false on iWARP, because librdmacm does not report what the two devices
// have agreed on.
func (i *id) MaySendFirst() bool {
	return !i.passive || i.dev.attr.Transport != ibv.TransportIWARP
}

func (i *id) Param() ibv.ConnParam {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.param
}

// begin calls f, which starts to connect or to accept.
func (i *id) begin(ctx context.Context, param *ibv.ConnParam, f func(*C.struct_rn_conn_param, unsafe.Pointer, C.int) C.int) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	i.calling.Lock()
	if err := i.prepare(param); err != nil {
		i.calling.Unlock()
		return err
	}
	cfg := &i.p.cfg
	c := C.struct_rn_conn_param{
		responder_resources: C.uint8_t(param.ResponderResources),
		initiator_depth:     C.uint8_t(param.InitiatorDepth),
		retry_count:         C.uint8_t(orDefault(cfg.Retries, 6)),
		rnr_retry_count:     C.uint8_t(orDefault(cfg.RNRRetries, 7)),
	}
	result := make(chan error, 1)
	call := func(private []byte) {
		defer i.calling.Unlock()
		result <- errno(f(&c, dataOf(private), C.int(len(private))))
	}
	if i.dev.siw {
		go call(slices.Clone(param.Private))
	} else {
		call(param.Private)
	}
	select {
	case err := <-result:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// prepare checks that the connection can be made now. A connection can be made only once,
// even if that fails.
func (i *id) prepare(param *ibv.ConnParam) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	attr := &i.dev.attr
	switch {
	case i.closed:
		return net.ErrClosed
	case i.qp == nil || i.up:
		return ibv.ErrState
	case len(param.Private) > attr.MaxPrivateData:
		return i.tooPrivate(param.Private)
	case param.ResponderResources < 0 || param.InitiatorDepth < 0 ||
		param.ResponderResources > attr.MaxQPRdAtom || param.InitiatorDepth > attr.MaxQPInitRdAtom:
		return fmt.Errorf("%d and %d RDMA Reads at a time (limits %d and %d): %w", param.ResponderResources,
			param.InitiatorDepth, attr.MaxQPRdAtom, attr.MaxQPInitRdAtom, ibv.ErrLimit)
	}
	if i.passive {
		param.InitiatorDepth = i.dev.limitDepth(param.InitiatorDepth, i.param.InitiatorDepth)
		// The depth that is given here becomes that of the peer's queue pair. The peer's
		// device may serve no more than was asked for.
		param.ResponderResources = i.dev.limitDepth(param.ResponderResources, i.param.ResponderResources)
		if err := i.setAckTimeout(); err != nil {
			return err
		}
	}
	i.up = true
	return nil
}

// dataOf returns private data in the form of C.
func dataOf(private []byte) unsafe.Pointer {
	if len(private) == 0 {
		return nil
	}
	return unsafe.Pointer(unsafe.SliceData(private))
}

func orDefault(n, fallback int) int {
	if n == 0 {
		return fallback
	}
	return n
}

func (i *id) Connect(ctx context.Context, param ibv.ConnParam) error {
	err := ibv.ErrState
	if i.ud {
		err = i.connectUD(ctx, &param)
	} else if !i.passive {
		err = i.establish(ctx, &param, func(c *C.struct_rn_conn_param, private unsafe.Pointer, n C.int) C.int {
			return C.rn_connect(i.c, c, private, n)
		})
	}
	if err != nil {
		return fmt.Errorf("%s: connect to %v: %w", i.dev.name, i.remote, err)
	}
	return nil
}

func (i *id) Accept(ctx context.Context, param ibv.ConnParam) error {
	err := ibv.ErrState
	if i.ud {
		err = i.acceptUD(ctx, &param)
	} else if i.passive {
		err = i.establish(ctx, &param, func(c *C.struct_rn_conn_param, private unsafe.Pointer, n C.int) C.int {
			return C.rn_accept(i.c, c, private, n)
		})
	}
	if err != nil {
		return fmt.Errorf("%s: accept from %v: %w", i.dev.name, i.remote, err)
	}
	return nil
}

// establish begins with f and waits for the end of the set-up.
func (i *id) establish(ctx context.Context, param *ibv.ConnParam, f func(*C.struct_rn_conn_param, unsafe.Pointer, C.int) C.int) error {
	if err := i.begin(ctx, param, f); err != nil {
		return err
	}
	s, err := i.next(ctx, cmEstablished)
	if err != nil {
		return err
	}
	return i.finish(&s, param)
}

// finish brings the queue pair up.
func (i *id) finish(s *step, param *ibv.ConnParam) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.closed || i.qp == nil {
		return net.ErrClosed
	}
	i.local = fromSockaddr(&i.c.src_storage)
	agreed := *param
	agreed.Private = nil
	if !i.passive {
		i.private = s.private
		agreed.InitiatorDepth = i.dev.limitDepth(agreed.InitiatorDepth, s.param.InitiatorDepth)
		agreed.ResponderResources = i.dev.limitDepth(agreed.ResponderResources, s.param.ResponderResources)
	}
	if i.dev.siw {
		// siw breaks the connection if a Read is posted and the peer serves none. Only
		// the queue pair knows whether the peer does.
		agreed.InitiatorDepth = min(agreed.InitiatorDepth, max(int(C.rn_siw_reads(i.c.qp)), 0))
	}
	i.param = agreed
	if i.dev.attr.Transport != ibv.TransportIWARP {
		d := i.p.cfg.RNRTimer
		if d == 0 {
			d = defaultRNRTimer
		}
		// Not every device lets one change it now; the default is only slower.
		C.rn_qp_rnr_timer(i.c.qp, C.int(rnrTimer(d)))
	}
	i.qp.up.Store(true)
	if i.dev.siw && (!i.passive || agreed.InitiatorDepth > 0) {
		i.qp.expectFirst()
	}
	return nil
}

// limitDepth limits a depth to the one that the peer has announced. On iWARP peers of MPA
// revision 1 announce none.
func (d *device) limitDepth(depth, peer int) int {
	if d.attr.Transport == ibv.TransportIWARP && peer == 0 {
		return depth
	}
	return min(depth, peer)
}

// heard is called when a message of the peer has arrived before the manager's event that
// establishes the connection. That event may have been lost.
func (i *id) heard() {
	i.mu.Lock()
	defer i.mu.Unlock()
	if !i.closed && i.passive {
		C.rn_established(i.c)
	}
}

func (i *id) Reject(private []byte) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	err := error(nil)
	switch {
	case i.closed:
		err = net.ErrClosed
	case !i.passive || i.up:
		err = ibv.ErrState
	case len(private) > i.maxPrivate():
		err = i.tooPrivate(private)
	default:
		i.up = true
		err = errno(C.rn_reject(i.c, dataOf(private), C.int(len(private))))
	}
	if err != nil {
		return fmt.Errorf("%s: reject: %w", i.dev.name, err)
	}
	return nil
}

func (i *id) Notify(f func(ibv.Event)) {
	i.mu.Lock()
	i.handler = f
	past := i.past
	i.mu.Unlock()
	for _, e := range past {
		f(e)
	}
}

// event calls the program's function, once for each kind of event.
func (i *id) event(e ibv.Event) {
	i.mu.Lock()
	known := slices.ContainsFunc(i.past, func(p ibv.Event) bool { return p.Kind == e.Kind })
	if !known {
		i.past = append(i.past, e)
	}
	f := i.handler
	i.mu.Unlock()
	if f != nil && !known {
		f(e)
	}
}

func (i *id) disconnected(err error) {
	i.mu.Lock()
	i.ended = true
	if !i.closed && i.qp != nil {
		// The peer has disconnected and waits for an answer, which librdmacm leaves to its
		// caller. The answer is given at once: what this device has acknowledged to the
		// peer was received before. iWARP has no such answer.
		if i.dev.attr.Transport != ibv.TransportIWARP {
			C.rn_disconnect(i.c)
		}
		i.qp.fail()
	}
	i.mu.Unlock()
	i.step(step{event: cmDisconnected, status: -int(syscall.ECONNRESET)})
	i.event(ibv.Event{Kind: ibv.EventDisconnected, Err: err})
}

func (i *id) Disconnect() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	switch {
	case i.closed:
		return fmt.Errorf("%s: disconnect: %w", i.dev.name, net.ErrClosed)
	case i.ud || i.qp == nil || !i.qp.up.Load():
		return fmt.Errorf("%s: disconnect: %w", i.dev.name, ibv.ErrState)
	}
	err := errno(C.rn_disconnect(i.c))
	if err != nil && !i.ended && !errors.Is(err, syscall.EINVAL) && !errors.Is(err, syscall.ENOTCONN) {
		return fmt.Errorf("%s: disconnect: %w", i.dev.name, err)
	}
	return nil
}

func (i *id) Close() error {
	i.calling.Lock()
	defer i.calling.Unlock()
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.qp != nil {
		return fmt.Errorf("%s: close: queue pair %d: %w", i.dev.name, i.qp.num, ibv.ErrBusy)
	}
	if i.closed {
		return net.ErrClosed
	}
	i.closed = true
	removeHandle(i.handle)
	i.leaveAll()
	if err := errno(C.rn_destroy_id(i.c)); err != nil {
		return fmt.Errorf("%s: close: %w", Name, err)
	}
	return nil
}
