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

	// resolveTimeout bounds each of the two steps of Resolve when the context
	// has no nearer deadline.
	resolveTimeout = 5 * time.Second

	defaultRNRTimer = 640 * time.Microsecond
)

// watch hands the connection manager's events to those they concern, for as long
// as the process lives.
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
	ud      bool // in the port space of UDP

	steps       chan step // events of setting up
	established bool      // by an event; of the goroutine that hears of them

	// calling is held while C sets the connection up, which on siw waits for
	// TCP; it goes before mu.
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
	ended   bool // the manager has told so
	up      bool
	handler func(ibv.Event)
	past    []ibv.Event // one of each kind
}

// step is an event of setting up.
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

// routeError says what it means when there is no way by RDMA. By the loopback
// interface, for one, the manager finds the argument invalid.
func routeError(err error) error {
	if errors.Is(err, syscall.ENODEV) || errors.Is(err, syscall.EINVAL) {
		return fmt.Errorf("no RDMA device on the interface that leads there: %w", err)
	}
	return err
}

// find takes from the library what it knows of the connection by now.
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
	i.mu.Lock() // the device's events may look already
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

// timeoutOf is what is left of ctx in milliseconds, within resolveTimeout.
func timeoutOf(ctx context.Context) C.int {
	d := resolveTimeout
	if deadline, ok := ctx.Deadline(); ok {
		d = min(d, time.Until(deadline))
	}
	return C.int(max(d.Milliseconds(), 1))
}

// managed takes an event of the connection manager.
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
			// The peer has given up before it heard that its answer arrived.
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

// overtaken is told on the passive side that the peer has disconnected. It does so only
// from a connection that is established to it, for which the answer to its request has
// arrived. That this side should know it, too, has come too late or got lost; what the peer
// has sent is here, and the program must have it.
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
		// As the peer sees them, rdma_get_cm_event(3): its view of the two
		// depths is the mirror of ours.
		param: ibv.ConnParam{ResponderResources: int(info.responder_resources), InitiatorDepth: int(info.initiator_depth)},
		peer:  udParam(info),
	}
}

func (i *id) step(s step) {
	select {
	case i.steps <- s:
	default: // nobody sets up any more
	}
}

// next waits for an event of setting up, which should be want.
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

// Reasons for a reject in InfiniBand's CM, volume 1, section 12.6.7.2.
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

// rejected tells a refusal by the peer's program from a port where nobody
// listens. On iWARP Linux reports the former as a reset.
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

// statusError is the status of an event as an error.
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

// MaySendFirst is false on iWARP: librdmacm does not say what the two devices
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

// prepare checks that the connection can be made now, which is once only,
// however it ends.
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
		// What is said here becomes the depth of the peer's queue pair, whose device may
		// do no more than was asked for.
		param.ResponderResources = i.dev.limitDepth(param.ResponderResources, i.param.ResponderResources)
		if err := i.setAckTimeout(); err != nil {
			return err
		}
	}
	i.up = true
	return nil
}

// dataOf is private data as C takes it.
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
		// siw breaks the connection over a Read to a peer that serves none, of
		// which only the queue pair knows.
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

// limitDepth keeps within what the peer says. On iWARP nothing is said by peers
// of MPA revision 1.
func (d *device) limitDepth(depth, peer int) int {
	if d.attr.Transport == ibv.TransportIWARP && peer == 0 {
		return depth
	}
	return min(depth, peer)
}

// heard is told by the device that a message has come before the
// manager's last word, which may have been lost.
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

// event tells the program, once for each kind.
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
		// The peer waits for the answer, and only we know that it is time. What
		// it has sent is received by now: it was acknowledged before.
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
