package iwarp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
)

// id implements ibv.ID. It is a TCP connection during MPA start-up (RFC 5044 section 7, RFC
// 6581), and the queue pair that gets the connection.
type id struct {
	dev           *device
	local, remote netip.AddrPort
	passive       bool
	request       iwarpwire.Start          // request is the peer's request, on the passive side.
	offer         *iwarpwire.SameHostOffer // offer came with the request, nil for none.

	mu      sync.Mutex
	conn    net.Conn // conn is nil before Connect, and when the queue pair has it.
	qp      *qp
	private []byte
	param   ibv.ConnParam
	closed  bool
	handler func(ibv.Event)
	past    []ibv.Event
}

// setup is the result of MPA start-up.
type setup struct {
	crc      bool
	ord, ird int
	awaits   bool    // awaits is set for a responder that must wait for the peer's first FPDU.
	rtr      rtrKind // rtr is the RTR message that an initiator must send first.
	eatSend  bool    // eatSend is set for a responder whose peer will send an RTR that is a Send.

	// handover is set if the connection may move to shared memory, and unshared is the reason
	// if it is not.
	handover *handover
	unshared error
	meeting  *meeting
}

// Resolve does not use the network: TCP finds the route in Connect.
func (p *Provider) Resolve(ctx context.Context, local, remote netip.AddrPort) (ibv.ID, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if !remote.Addr().IsValid() || remote.Port() == 0 {
		return nil, fmt.Errorf("%s: resolve %v: %w", Name, remote, errno.EADDRNOTAVAIL)
	}
	return &id{dev: p.dev, local: local, remote: remote}, nil
}

func (i *id) Device() ibv.Device         { return i.dev }
func (i *id) Port() int                  { return 1 }
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

func (i *id) MaySendFirst() bool {
	r := &i.request
	return !i.passive || r.P2P && (r.RTRWrite || r.RTRRead || r.RTRSend)
}

func (i *id) Param() ibv.ConnParam {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.param
}

func (i *id) CreateQP(p ibv.PD, init ibv.QPInit) (ibv.QP, error) {
	domain, ok := p.(*pd)
	if !ok || domain.dev != i.dev {
		return nil, fmt.Errorf("%s: create queue pair: protection domain of another device: %w", Name, syscall.EINVAL)
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.closed || i.qp != nil {
		return nil, fmt.Errorf("%s: create queue pair: %w", Name, ibv.ErrState)
	}
	q, err := newQP(i.dev, domain, &init)
	if err != nil {
		return nil, err
	}
	i.qp = q
	return q, nil
}

// ready checks param, and returns the queue pair to connect.
func (i *id) ready(param *ibv.ConnParam, passive bool) (*qp, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	switch {
	case i.closed:
		return nil, net.ErrClosed
	case i.passive != passive || i.qp == nil || i.qp.State() != ibv.QPSInit || passive && i.conn == nil:
		return nil, ibv.ErrState
	case len(param.Private) > i.dev.privateLimit():
		return nil, fmt.Errorf("%d bytes of private data (limit %d): %w",
			len(param.Private), i.dev.privateLimit(), ibv.ErrLimit)
	case param.ResponderResources < 0 || param.InitiatorDepth < 0 ||
		param.ResponderResources > maxRdAtom || param.InitiatorDepth > maxRdAtom:
		return nil, fmt.Errorf("%d and %d RDMA Reads at a time (limit %d): %w",
			param.ResponderResources, param.InitiatorDepth, maxRdAtom, ibv.ErrLimit)
	}
	return i.qp, nil
}

func (i *id) Connect(ctx context.Context, param ibv.ConnParam) error {
	q, err := i.ready(&param, false)
	if err == nil {
		err = i.connect(ctx, q, param)
	}
	if err != nil {
		return fmt.Errorf("%s: connect to %v: %w", Name, i.remote, err)
	}
	return nil
}

func (i *id) connect(ctx context.Context, q *qp, param ibv.ConnParam) error {
	deadline := time.Now().Add(i.dev.cfg.ConnectTimeout)
	conn, err := dialTCP(ctx, i.local, i.remote, deadline)
	if err != nil {
		return cause(ctx, err)
	}
	conn.SetDeadline(deadline)
	stop := func() bool { return true }
	if ctx.Done() != nil {
		stop = context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	}
	s, reply, err := i.initiate(conn, &param)
	if !stop() && err == nil {
		err = ctx.Err() // The deadline was set, or will be, so conn cannot be used.
	}
	if err == nil {
		conn.SetDeadline(time.Time{})
		i.mu.Lock()
		i.local = unmapped(conn.LocalAddr())
		i.private = reply.Private
		i.param = ibv.ConnParam{InitiatorDepth: s.ord, ResponderResources: s.ird}
		if i.closed {
			err = net.ErrClosed
		}
		i.mu.Unlock()
	}
	if err != nil {
		conn.Close()
		return cause(ctx, err)
	}
	l, err := i.dev.open(conn, &s)
	if err != nil {
		conn.Close()
		return cause(ctx, err)
	}
	return startStream(q, l, s, i.event)
}

// cause returns the reason of the context in place of the error that it has caused.
func cause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// initiate is the active side of MPA start-up.
func (i *id) initiate(conn net.Conn, param *ibv.ConnParam) (s setup, reply iwarpwire.Start, err error) {
	private, unshared := i.dev.offerShared(conn, param.Private)
	if err := i.dev.requireShared(unshared); err != nil {
		return s, reply, err
	}
	req := iwarpwire.Start{CRC: i.dev.cfg.CRC, Enhanced: true, Rev: 2, Private: private,
		IRD: uint16(param.ResponderResources), ORD: uint16(param.InitiatorDepth),
		P2P: true, RTRWrite: true, RTRRead: true}
	b, err := req.Append(nil)
	if err != nil {
		return s, reply, err
	}
	if _, err = conn.Write(b); err != nil {
		return s, reply, err
	}
	if reply, err = readStart(conn, true); err != nil {
		return s, reply, fmt.Errorf("MPA reply: %w", err)
	}
	if reply.Reject {
		return s, reply, &ibv.RejectError{Private: reply.Private, Text: "refused by its program", Err: errno.ECONNREFUSED}
	}
	if reply.Markers {
		return s, reply, errMarkers
	}
	s = setup{crc: req.CRC || reply.CRC, ord: param.InitiatorDepth, ird: param.ResponderResources, unshared: unshared, meeting: &i.dev.meeting}
	if unshared == nil {
		h := handover{required: i.dev.cfg.SameHost == SameHostRequire}
		var ok bool
		if reply.Private, h.SameHostAnswer, ok = iwarpwire.CutSameHostAnswer(reply.Private); ok {
			s.handover = &h
		} else {
			s.unshared = errSharedAnswer
		}
		if err := i.dev.requireShared(s.unshared); err != nil {
			return s, reply, err
		}
	}
	if !reply.Enhanced {
		return s, reply, nil // Revision 1 has no depths. The programs must agree on them.
	}
	if reply.IRD != iwarpwire.DepthNotNegotiated {
		s.ord = min(s.ord, int(reply.IRD))
	}
	if reply.ORD != iwarpwire.DepthNotNegotiated && int(reply.ORD) > s.ird {
		return s, reply, refuseStart(conn, iwarpwire.ErrInsufficientIRD, s.crc)
	}
	if reply.P2P {
		switch {
		case reply.RTRWrite:
			s.rtr = rtrWrite
		case reply.RTRRead:
			s.rtr = rtrRead
		default:
			return s, reply, refuseStart(conn, iwarpwire.ErrNoRTR, s.crc)
		}
	}
	return s, reply, nil
}

var errMarkers = errors.New("the peer demands MPA markers, which this device does not send")

// refuseStart tells the peer the reason why its reply cannot be used.
func refuseStart(conn net.Conn, term *iwarpwire.TermError, crc bool) error {
	conn.Write(appendTerminate(nil, &iwarpwire.TermMsg{Err: *term}, crc))
	return term
}

const maxStart = iwarpwire.StartLen + iwarpwire.MaxPrivate + 1

var startFrames = sync.Pool{New: func() any { return new([maxStart]byte) }}

// readStart reads a Request or Reply frame. Neither side may send anything behind its frame
// until it has the frame of the other side (RFC 5044, section 7.1). So more bytes than the
// frame has are an error.
func readStart(conn net.Conn, reply bool) (iwarpwire.Start, error) {
	frame := startFrames.Get().(*[maxStart]byte)
	defer startFrames.Put(frame)
	buf := frame[:]
	n, want := 0, iwarpwire.StartLen
	for n < want {
		k, err := conn.Read(buf[n:])
		n += k
		if err == io.EOF {
			err = fmt.Errorf("closed during MPA start-up, as by a peer that does not speak iWARP or has given up: %w", errno.ECONNRESET)
		}
		if err != nil {
			return iwarpwire.Start{}, err
		}
		if n >= iwarpwire.StartLen && want == iwarpwire.StartLen {
			private, err := iwarpwire.ParseStartHeader(buf[:n], reply)
			if err != nil {
				return iwarpwire.Start{}, err
			}
			want += private
		}
	}
	if n > want {
		return iwarpwire.Start{}, errEarly
	}
	start, err := iwarpwire.ParseStart(buf[:n], reply)
	start.Private = bytes.Clone(start.Private) // the frame goes back to the pool
	return start, err
}

var errEarly = errors.New("the peer sent data before MPA start-up was over")

func (i *id) Accept(ctx context.Context, param ibv.ConnParam) error {
	q, err := i.ready(&param, true)
	if err == nil {
		err = i.accept(ctx, q, param)
	}
	if err != nil {
		return fmt.Errorf("%s: accept from %v: %w", Name, i.remote, err)
	}
	return nil
}

func (i *id) accept(ctx context.Context, q *qp, param ibv.ConnParam) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	req := &i.request
	i.mu.Lock()
	conn := i.conn
	i.conn = nil
	i.mu.Unlock()
	if conn == nil {
		return net.ErrClosed
	}
	h, unshared := i.dev.acceptShared(conn, i.offer, param.Private)
	if err := i.dev.requireShared(unshared); err != nil {
		return errors.Join(err, rejectStart(conn, req, nil))
	}
	private := param.Private
	if h != nil {
		private = h.Append(private[:len(private):len(private)])
	}
	reply := iwarpwire.Start{Reply: true, CRC: req.CRC || i.dev.cfg.CRC, Enhanced: req.Enhanced, Rev: req.Rev, Private: private}
	s := setup{handover: h, unshared: unshared, meeting: &i.dev.meeting, crc: reply.CRC, ord: param.InitiatorDepth, ird: param.ResponderResources, awaits: true}
	if req.Enhanced {
		// RFC 6581: this side's ORD is within the peer's IRD, and the peer lowers its ORD
		// to this side's IRD.
		if req.IRD != iwarpwire.DepthNotNegotiated {
			s.ord = min(s.ord, int(req.IRD))
		}
		reply.IRD, reply.ORD = uint16(s.ird), uint16(s.ord)
		if req.P2P {
			reply.P2P = true
			switch {
			case req.RTRWrite:
				reply.RTRWrite = true
			case req.RTRRead:
				reply.RTRRead = true
			case req.RTRSend:
				reply.RTRSend, s.eatSend = true, true
			default:
				reply.P2P = false
			}
		}
	}
	i.mu.Lock()
	i.param = ibv.ConnParam{InitiatorDepth: s.ord, ResponderResources: s.ird}
	i.mu.Unlock()
	b, err := reply.Append(nil)
	var l link
	if err == nil {
		// The link exists before the peer learns how to move it to shared memory.
		l, err = i.dev.open(conn, &s)
	}
	if err != nil {
		if h != nil {
			s.meeting.release()
		}
		conn.Close()
		return err
	}
	// A Reply always fits into the socket's buffer, so it needs no deadline.
	if _, err = conn.Write(b); err != nil {
		l.close(false)
		return err
	}
	return startStream(q, l, s, i.event)
}

func (i *id) Reject(private []byte) error {
	if len(private) > maxPrivateData {
		return fmt.Errorf("%s: reject: %d bytes of private data (limit %d): %w", Name, len(private), maxPrivateData, ibv.ErrLimit)
	}
	i.mu.Lock()
	conn := i.conn
	i.conn = nil
	i.mu.Unlock()
	if !i.passive || conn == nil {
		return fmt.Errorf("%s: reject: %w", Name, ibv.ErrState)
	}
	return rejectStart(conn, &i.request, private)
}

// rejectStart answers a Request with a Reply that has R set, and closes.
func rejectStart(conn net.Conn, req *iwarpwire.Start, private []byte) error {
	reply := iwarpwire.Start{Reply: true, Reject: true, CRC: req.CRC, Enhanced: req.Enhanced, Rev: req.Rev, Private: private}
	b, err := reply.Append(nil)
	if err == nil {
		_, err = conn.Write(b)
	}
	return errors.Join(err, conn.Close())
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

func (i *id) event(e ibv.Event) {
	i.mu.Lock()
	f := i.handler
	i.past = append(i.past, e)
	i.mu.Unlock()
	if f != nil {
		f(e)
	}
}

func (i *id) Disconnect() error {
	i.mu.Lock()
	q := i.qp
	i.mu.Unlock()
	if q == nil || q.stream.Load() == nil {
		return fmt.Errorf("%s: disconnect: %w", Name, ibv.ErrState)
	}
	q.stream.Load().disconnect()
	return nil
}

// stream returns the stream of the ID's queue pair, nil before the connection is established.
func (i *id) stream() *stream {
	i.mu.Lock()
	q := i.qp
	i.mu.Unlock()
	if q == nil {
		return nil
	}
	return q.stream.Load()
}

// Link implements ibv.Linker.
func (i *id) Link() (name, reason string) {
	st := i.stream()
	if st == nil {
		return "", ""
	}
	err := st.unshared
	if l, ok := st.link.(interface{ sharing() error }); ok {
		err = l.sharing()
	}
	if err != nil {
		return "tcp", err.Error()
	}
	return "shared memory", ""
}

// Unsent implements ibv.Unsender. Sends complete when the kernel has their bytes.
func (i *id) Unsent() int {
	if st := i.stream(); st != nil {
		return st.unsent()
	}
	return 0
}

// Acknowledged implements ibv.Acknowledger.
func (i *id) Acknowledged() ibv.Ack {
	st := i.stream()
	if st == nil || st.direct == nil {
		return ibv.AckUnknown
	}
	st.qp.sq.mu.Lock()
	finished, stopped := st.tx.finished, st.tx.stopped
	st.qp.sq.mu.Unlock()
	switch {
	case finished:
		return st.direct.acknowledged()
	case stopped:
		return ibv.AckUnknown
	}
	return ibv.AckPending
}

// Ending implements ibv.Ender.
func (i *id) Ending() {
	if st := i.stream(); st != nil {
		if l, ok := st.link.(interface{ ending() }); ok {
			l.ending()
		}
	}
}

// A hostProber is a link that implements ibv.HostProber.
type hostProber interface {
	probeHost(idle, patience time.Duration) bool
	hostHeard() (ago time.Duration, owes bool)
}

// ProbeHost implements ibv.HostProber.
func (i *id) ProbeHost(idle, patience time.Duration) bool {
	if st := i.stream(); st != nil {
		l, ok := st.link.(hostProber)
		return ok && l.probeHost(idle, patience)
	}
	return false
}

// HostHeard implements ibv.HostProber.
func (i *id) HostHeard() (ago time.Duration, owes bool) {
	if st := i.stream(); st != nil {
		if l, ok := st.link.(hostProber); ok {
			return l.hostHeard()
		}
	}
	return 0, false
}

func (i *id) Close() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.qp != nil && !i.qp.closed.Load() {
		return fmt.Errorf("%s: close: queue pair %d: %w", Name, i.qp.num, ibv.ErrBusy)
	}
	if i.closed {
		return net.ErrClosed
	}
	i.closed = true
	if i.conn != nil {
		i.conn.Close()
		i.conn = nil
	}
	return nil
}
