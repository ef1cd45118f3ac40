package verbstest

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// PairConfig has the properties of the queue pairs that [NewPair] connects. A zero field
// means the default. Both ends have the same properties.
type PairConfig struct {
	SendWR int // SendWR is the number of work requests in the send queue, 32 by default.
	RecvWR int // RecvWR is the number of work requests in the receive queue, 32 by default.
	SGE    int // SGE is the number of elements in a work request, 1 by default.
	Inline int // Inline is the number of bytes of an inline send, 0 by default.
	Reads  int // Reads is the number of RDMA Reads at a time in each direction, 4 by default.

	SignalAll bool  // SignalAll is that of ibv.QPInit.
	SharedCQ  bool  // SharedCQ is set for one completion queue for sends and receives.
	CQDepth   int   // CQDepth has room for all completions of the queues by default.
	Share     *Pair // Share is a pair whose domains and completion queues are used.
}

func (c PairConfig) filled() PairConfig {
	set := func(field *int, value int) {
		if *field == 0 {
			*field = value
		}
	}
	set(&c.SendWR, 32)
	set(&c.RecvWR, 32)
	set(&c.SGE, 1)
	set(&c.Reads, 4)
	set(&c.CQDepth, c.SendWR+c.RecvWR)
	return c
}

// Pair is two connected queue pairs. All its objects are closed at the end of the test. The
// test fails if a Close does.
type Pair struct {
	Active, Passive *End
}

// NewPair connects two queue pairs of env, or ends the test.
func NewPair(t testing.TB, env Env, cfg PairConfig) *Pair {
	t.Helper()
	return env.pair(t, env.listen(t), cfg)
}

// End is one end of a [Pair].
type End struct {
	ID     ibv.ID
	Dev    ibv.Device
	PD     ibv.PD
	SendCQ ibv.CQ
	RecvCQ ibv.CQ // RecvCQ is the same as SendCQ with SharedCQ.
	QP     ibv.QP

	param    ibv.ConnParam // param is for Connect or Accept.
	events   eventLog
	mems     []*Mem
	scratch  *Mem // scratch is for sync.
	shared   bool // shared is set if PD and CQs belong to another End.
	qpClosed bool
	idClosed bool
}

// listen returns a listener on a free port, closed at the end of the test.
func (env Env) listen(t testing.TB) ibv.Listener {
	t.Helper()
	l, err := env.Passive.Listen(t.Context(), netip.AddrPortFrom(env.Addr, 0), 0)
	must(t, "Listen", err)
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Errorf("Listener.Close: %v", err)
		}
	})
	return l
}

// active prepares an end that can connect to remote.
func (env Env) active(ctx context.Context, remote netip.AddrPort, cfg PairConfig) (*End, error) {
	if env.Active == nil {
		env.Active = env.Passive
	}
	id, err := env.Active.Resolve(ctx, netip.AddrPort{}, remote)
	if err != nil {
		return nil, fmt.Errorf("resolve: %w", err)
	}
	var share *End
	if cfg.Share != nil {
		share = cfg.Share.Active
	}
	return newEnd(id, cfg, share)
}

// passive waits for a request and prepares the end that can accept it.
func passive(ctx context.Context, l ibv.Listener, cfg PairConfig) (*End, error) {
	id, err := l.Accept(ctx)
	if err != nil {
		return nil, fmt.Errorf("listener accept: %w", err)
	}
	var share *End
	if cfg.Share != nil {
		share = cfg.Share.Passive
	}
	return newEnd(id, cfg, share)
}

// unconnected returns an active end that has no queue pair yet.
func (env Env) unconnected(t testing.TB) *End {
	t.Helper()
	return env.unconnectedTo(t, env.listen(t))
}

// unconnectedTo is like unconnected, with a given listener.
func (env Env) unconnectedTo(t testing.TB, l ibv.Listener) *End {
	t.Helper()
	id, err := env.Active.Resolve(t.Context(), netip.AddrPort{}, l.Addr())
	must(t, "Resolve", err)
	e := &End{ID: id, Dev: id.Device()}
	e.atEnd(t)
	must(t, "create", e.createQueues(PairConfig{}.filled()))
	return e
}

// newEnd creates the queue pair, and what it needs, on id. The end owns id then.
func newEnd(id ibv.ID, cfg PairConfig, share *End) (*End, error) {
	cfg = cfg.filled()
	e := &End{ID: id, Dev: id.Device()}
	var err error
	if share != nil {
		e.shared, e.PD, e.SendCQ, e.RecvCQ = true, share.PD, share.SendCQ, share.RecvCQ
	} else {
		err = e.createQueues(cfg)
	}
	if err == nil {
		err = e.createQP(cfg)
	}
	if err != nil {
		return nil, errors.Join(err, e.close())
	}
	id.Notify(e.events.add)
	return e, nil
}

// createQueues creates the protection domain and the completion queues.
func (e *End) createQueues(cfg PairConfig) (err error) {
	if e.PD, err = e.Dev.AllocPD(); err != nil {
		return fmt.Errorf("alloc PD: %w", err)
	}
	if e.SendCQ, err = e.Dev.CreateCQ(cfg.CQDepth); err != nil {
		return fmt.Errorf("create CQ: %w", err)
	}
	if cfg.SharedCQ {
		e.RecvCQ = e.SendCQ
	} else if e.RecvCQ, err = e.Dev.CreateCQ(cfg.CQDepth); err != nil {
		return fmt.Errorf("create CQ: %w", err)
	}
	return nil
}

func (e *End) createQP(cfg PairConfig) (err error) {
	attr := e.Dev.Attr()
	e.param = ibv.ConnParam{
		ResponderResources: min(cfg.Reads, attr.MaxQPRdAtom),
		InitiatorDepth:     min(cfg.Reads, attr.MaxQPInitRdAtom),
	}
	e.QP, err = e.ID.CreateQP(e.PD, ibv.QPInit{
		SendCQ: e.SendCQ,
		RecvCQ: e.RecvCQ,
		Cap: ibv.QPCap{MaxSendWR: cfg.SendWR, MaxRecvWR: cfg.RecvWR,
			MaxSendSGE: cfg.SGE, MaxRecvSGE: cfg.SGE, MaxInline: cfg.Inline},
		SignalAll: cfg.SignalAll,
	})
	if err != nil {
		return fmt.Errorf("create QP: %w", err)
	}
	return nil
}

// close releases all open objects of the end, children first.
func (e *End) close() error {
	var errs []error
	if e.QP != nil && !e.qpClosed {
		e.qpClosed = true
		errs = append(errs, named("QP", e.QP.Close()))
	}
	for _, m := range e.mems {
		if !m.closed {
			m.closed = true
			errs = append(errs, named("MR", m.MR.Close()))
		}
	}
	if !e.shared {
		if e.RecvCQ != nil && e.RecvCQ != e.SendCQ {
			errs = append(errs, named("CQ", e.RecvCQ.Close()))
		}
		if e.SendCQ != nil {
			errs = append(errs, named("CQ", e.SendCQ.Close()))
		}
		if e.PD != nil {
			errs = append(errs, named("PD", e.PD.Close()))
		}
		e.RecvCQ, e.SendCQ, e.PD = nil, nil, nil // The next call of close must not close them again.
	}
	if !e.idClosed {
		e.idClosed = true
		errs = append(errs, named("ID", e.ID.Close()))
	}
	return errors.Join(errs...)
}

func named(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s close: %w", what, err)
}

// atEnd closes e when the test is over.
func (e *End) atEnd(t testing.TB) *End {
	t.Cleanup(func() {
		if err := e.close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

// helloID is the request that opens a connection.
const helloID = 1<<64 - 1

// pair connects two queue pairs through l.
func (env Env) pair(t testing.TB, l ibv.Listener, cfg PairConfig) *Pair {
	t.Helper()
	for try := 1; ; try++ {
		p, err := env.connect(t, l, cfg)
		if err == nil || try == portTries || !errors.Is(err, errno.EADDRNOTAVAIL) {
			must(t, "set up", err)
			must(t, "first message", hello(p.Active, p.Passive))
			return p
		}
	}
}

// portTries is how often a connection is tried if TCP does not give the port. rdma_cm
// chooses a port of its own, and siw connects by TCP, where that port may be in use.
const portTries = 4

// connect tries once to connect.
func (env Env) connect(t testing.TB, l ibv.Listener, cfg PairConfig) (*Pair, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	a, err := env.active(ctx, l.Addr(), cfg)
	must(t, "active end", err)
	a.atEnd(t)
	connected := make(chan error, 1)
	go func() {
		err := a.ID.Connect(ctx, a.param)
		connected <- err
		if err != nil {
			cancel() // No request will come.
		}
	}()
	p, err := passive(ctx, l, cfg)
	if err == nil {
		p.atEnd(t)
		err = p.accept(ctx)
	}
	if err != nil {
		cancel()
	}
	return &Pair{a, p}, errors.Join(<-connected, err)
}

// accept accepts with the receive for the first message posted.
func (e *End) accept(ctx context.Context) error {
	if _, err := e.QP.PostRecv([]ibv.RecvWR{{ID: helloID}}); err != nil {
		return fmt.Errorf("post the first receive: %w", err)
	}
	return e.ID.Accept(ctx, e.param)
}

// hello sends the first message, an empty one, from the active side. On iWARP the passive
// side must not send before (RFC 5044, section 7). It does not arm the completion queues,
// so that tests of events find them unarmed.
func hello(a, p *End) error {
	if _, err := a.QP.PostSend([]ibv.SendWR{{ID: helloID, Op: ibv.OpSend, Flags: ibv.SendSignaled}}); err != nil {
		return err
	}
	done := func(wc ibv.WC, err error) error {
		if err == nil && (wc.ID != helloID || wc.Status != ibv.WCSuccess) {
			err = fmt.Errorf("completion %+v (%v)", wc, wc.Status)
		}
		return err
	}
	if err := done(polled(a.SendCQ)); err != nil {
		return err
	}
	return done(polled(p.RecvCQ))
}

// CloseQP closes the queue pair before the end of the test.
func (e *End) CloseQP(t testing.TB) {
	t.Helper()
	e.qpClosed = true
	must(t, "QP.Close", e.QP.Close())
}

// Register registers buf until the end is closed.
func (e *End) Register(t testing.TB, buf []byte, access ibv.Access) *Mem {
	t.Helper()
	mr, err := e.PD.RegMR(buf, access)
	must(t, "RegMR", err)
	m := &Mem{Buf: buf, MR: mr}
	e.mems = append(e.mems, m)
	return m
}

// Send posts wrs to the send queue and ends the test unless all are taken.
func (e *End) Send(t testing.TB, wrs ...ibv.SendWR) {
	t.Helper()
	if n, err := e.QP.PostSend(wrs); err != nil || n != len(wrs) {
		t.Fatalf("PostSend took %d of %d: %v", n, len(wrs), err)
	}
}

// Recv posts wrs to the receive queue and ends the test unless all are taken.
func (e *End) Recv(t testing.TB, wrs ...ibv.RecvWR) {
	t.Helper()
	if n, err := e.QP.PostRecv(wrs); err != nil || n != len(wrs) {
		t.Fatalf("PostRecv took %d of %d: %v", n, len(wrs), err)
	}
}

// transfer sends msg to the peer and checks that it arrives.
func (e *End) transfer(t testing.TB, peer *End, msg []byte) {
	t.Helper()
	src := e.Register(t, append([]byte(nil), msg...), 0)
	dst := peer.Register(t, guarded(len(msg)+16), localWrite)
	peer.Recv(t, ibv.RecvWR{ID: 2, SGL: []ibv.SGE{dst.SGE(0, len(dst.Buf))}})
	e.Send(t, ibv.SendWR{ID: 1, Op: ibv.OpSend, Flags: ibv.SendSignaled, SGL: []ibv.SGE{src.SGE(0, len(msg))}})
	succeeded(t, e, next(t, e.SendCQ), 1, ibv.WCSend)
	wc := next(t, peer.RecvCQ)
	succeeded(t, peer, wc, 2, ibv.WCRecv)
	sameBytes(t, "message", dst.Buf[:wc.ByteLen], msg)
	untouched(t, "behind the message", dst.Buf[len(msg):])
}

// sync returns when the peer's device has received all that e has sent before, completions
// included. A Read is served after the Sends and Writes before it. sync needs e's send
// completions to have been polled. It does not arm.
func (e *End) sync(t testing.TB, peer *End) {
	t.Helper()
	wc := e.trySync(t, peer)
	succeeded(t, e, wc, syncID, ibv.WCRead)
}

// syncID is the ID of the request that sync makes.
const syncID = helloID - 1

// trySync is like sync, on a connection that may be broken.
func (e *End) trySync(t testing.TB, peer *End) ibv.WC {
	t.Helper()
	for _, end := range []*End{e, peer} {
		if end.scratch == nil {
			end.scratch = end.Register(t, make([]byte, 8), allRights)
		}
	}
	e.Send(t, ibv.SendWR{ID: syncID, Op: ibv.OpRead, Flags: ibv.SendSignaled,
		SGL: e.scratch.SGL(0, 1, 1), RemoteAddr: peer.scratch.Addr(0), RKey: peer.scratch.MR.RKey()})
	return pollNext(t, e.SendCQ)
}

// iwarp reports whether the device is an iWARP device. There the device ends a broken
// connection, and the peer gets the event at once.
func (e *End) iwarp() bool { return e.Dev.Attr().Transport == ibv.TransportIWARP }

// inOrder makes requests complete in order on devices whose RDMA Reads may be late.
func (e *End) inOrder(wrs []ibv.SendWR) []ibv.SendWR {
	if e.Dev.Attr().Quirks.ReadsOutOfOrder {
		for i := range wrs {
			wrs[i].Flags |= ibv.SendFence
		}
	}
	return wrs
}
