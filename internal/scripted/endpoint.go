package scripted

import (
	"errors"
	"slices"
	"sync"

	"github.com/rdmanet/rdmanet/ibv"
)

// An Endpoint has the verbs of one end of a connection: its queue pair, its completion
// queues, and its ID. Sends and receives may share a completion queue. All methods may be
// called by several goroutines at once.
type Endpoint struct {
	p   *Provider
	id  ibv.ID
	qp  ibv.QP
	cqs []*cq
	qpn uint32

	mu       sync.Mutex
	scripted script
	sends    []posted        // sends were posted, and the program does not know their completion. The oldest one comes first.
	count    uint64          // count counts the posted sends.
	recvIDs  map[uint64]bool // recvIDs has the IDs of receives that were posted.
	recvs    int             // recvs counts the posted receives.
	blocked  int             // blocked counts the posts that wait at the gate.
}

// script is what the test has asked for. The functions are called without any lock of this
// package.
type script struct {
	hold       func(wc *ibv.WC) bool
	postSend   func(wrs []ibv.SendWR) error
	postRecv   func(wrs []ibv.RecvWR) error
	polled     func(wcs []ibv.WC)
	arm        func(solicitedOnly bool) error
	register   func(buf []byte, access ibv.Access) (closing func(), err error)
	disconnect func() (pass bool)
	gate       chan struct{} // gate is closed when posts may go on.
	pass       int           // pass is how many completions may pass although they are to be held.
}

// posted is a request of the send queue.
type posted struct {
	id uint64
	op ibv.Opcode
}

func (e *Endpoint) script() script {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.scripted
}

func (e *Endpoint) set(change func(s *script)) {
	e.mu.Lock()
	change(&e.scripted)
	e.mu.Unlock()
	e.changed()
}

func (e *Endpoint) changed() {
	for _, q := range e.cqs {
		q.changed()
	}
}

// each calls f for each completion queue, with its lock held.
func (e *Endpoint) each(f func(q *cq)) {
	for _, q := range e.cqs {
		q.mu.Lock()
		f(q)
		q.mu.Unlock()
	}
}

// Hold holds back the completions for which which returns true. The others pass, also those
// that were held back before. With a nil which all pass. If an event is due, the goroutine
// that waits is woken. which must not call methods of the endpoint, except IsSend.
func (e *Endpoint) Hold(which func(wc *ibv.WC) bool) { e.set(func(s *script) { s.hold = which }) }

// HoldAll holds every completion back, or lets all pass. While all are held, the program
// sees no completion.
func (e *Endpoint) HoldAll(on bool) {
	if !on {
		e.Hold(nil)
		return
	}
	e.Hold(func(*ibv.WC) bool { return true })
}

// Pass lets the n oldest completions pass that Hold holds back now or later. Hold still
// holds back the completions behind them.
func (e *Endpoint) Pass(n int) { e.set(func(s *script) { s.pass += n }) }

// passes reports whether a completion may pass although it is to be held.
func (e *Endpoint) passes() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.scripted.pass == 0 {
		return false
	}
	e.scripted.pass--
	return true
}

// Held returns how many completions are held back for which which returns true.
func (e *Endpoint) Held(which func(wc *ibv.WC) bool) (n int) {
	e.each(func(q *cq) {
		for i := range q.kept {
			if which(&q.kept[i]) {
				n++
			}
		}
	})
	return n
}

// OnPostSend sets a function that is called with the requests that are posted to the send
// queue. If it returns an error, nothing is posted.
func (e *Endpoint) OnPostSend(f func(wrs []ibv.SendWR) error) {
	e.set(func(s *script) { s.postSend = f })
}

// OnPostRecv is OnPostSend for receives.
func (e *Endpoint) OnPostRecv(f func(wrs []ibv.RecvWR) error) {
	e.set(func(s *script) { s.postRecv = f })
}

// OnPolled sets a function that is called with the completions of a Poll that found some,
// before Poll returns them.
func (e *Endpoint) OnPolled(f func(wcs []ibv.WC)) { e.set(func(s *script) { s.polled = f }) }

// OnArm sets a function that is called before a completion queue is armed. If it returns an
// error, the queue is not armed.
func (e *Endpoint) OnArm(f func(solicitedOnly bool) error) { e.set(func(s *script) { s.arm = f }) }

// OnRegister sets a function that is called when memory is registered with the queue pair or
// in its domain. Its error is that of RegMR. closing, if not nil, is called when the region is
// about to be closed.
func (e *Endpoint) OnRegister(f func(buf []byte, access ibv.Access) (closing func(), err error)) {
	e.set(func(s *script) { s.register = f })
}

// OnDisconnect sets a function that ID.Disconnect calls. The device gets the call only if
// pass is true.
func (e *Endpoint) OnDisconnect(f func() (pass bool)) { e.set(func(s *script) { s.disconnect = f }) }

// Gate makes the posts of sends wait until open is called.
func (e *Endpoint) Gate() (open func()) {
	gate := make(chan struct{})
	e.set(func(s *script) { s.gate = gate })
	return sync.OnceFunc(func() {
		e.set(func(s *script) {
			if s.gate == gate {
				s.gate = nil
			}
		})
		close(gate)
	})
}

// Blocked returns how many posts wait at the gate.
func (e *Endpoint) Blocked() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.blocked
}

// Break moves the queue pair to the error state, as a failed device does.
func (e *Endpoint) Break() error { return e.qp.SetError() }

// Disconnect calls Disconnect of the ID, as the program would.
func (e *Endpoint) Disconnect() error { return e.id.Disconnect() }

// Interrupt calls Interrupt of the completion queues.
func (e *Endpoint) Interrupt() {
	for _, q := range e.cqs {
		q.Interrupt()
	}
}

// Asleep reports whether a goroutine is in Wait and was not interrupted.
func (e *Endpoint) Asleep() bool { return e.Sleeper() != 0 }

// Sleeper returns the number of the goroutine that is in Wait and was not interrupted, 0 if
// there is none.
func (e *Endpoint) Sleeper() (g uint64) {
	e.each(func(q *cq) {
		if !q.interrupted && len(q.waiting) > 0 {
			g = q.waiting[len(q.waiting)-1]
		}
	})
	return g
}

// MostWaiting returns how many goroutines were in Wait of one queue at a time at most.
func (e *Endpoint) MostWaiting() (n int) {
	e.each(func(q *cq) { n = max(n, q.most) })
	return n
}

// ArmedForAll reports whether a completion queue is armed for all completions, and not for
// solicited receives only.
func (e *Endpoint) ArmedForAll() (all bool) {
	e.each(func(q *cq) { all = all || q.all })
	return all
}

// Poller returns the number of the goroutine that polled last.
func (e *Endpoint) Poller() (g uint64) {
	e.each(func(q *cq) {
		if q.poller != 0 {
			g = q.poller
		}
	})
	return g
}

// Depth returns how many completions the completion queues were asked to hold.
func (e *Endpoint) Depth() (n int) {
	e.each(func(q *cq) { n += q.asked })
	return n
}

// Posted returns how many requests were posted to the send queue.
func (e *Endpoint) Posted() uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.count
}

// Receives returns how many receives were posted.
func (e *Endpoint) Receives() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.recvs
}

// Outstanding returns how many sends and RDMA Writes were posted after the latest one whose
// completion the program knows. For the program they may still use places in the send
// queue.
func (e *Endpoint) Outstanding() (n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, w := range e.sends {
		if w.op != ibv.OpRead {
			n++
		}
	}
	return n
}

// Reading returns how many posted RDMA Reads have no completion that the program knows.
func (e *Endpoint) Reading() (n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, w := range e.sends {
		if w.op == ibv.OpRead {
			n++
		}
	}
	return n
}

// IsSend reports whether a completion is that of a request of the send queue. A failed
// completion has no valid opcode. Then its ID decides.
func (e *Endpoint) IsSend(wc *ibv.WC) bool {
	if wc.Status == ibv.WCSuccess {
		return !wc.Op.IsRecv()
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return !e.recvIDs[wc.ID]
}

// note records requests that were posted.
func (e *Endpoint) note(wrs []ibv.SendWR) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for i := range wrs {
		e.sends = append(e.sends, posted{wrs[i].ID, wrs[i].Op})
	}
	e.count += uint64(len(wrs))
}

// forget removes the request of a completion that the program is about to get. It also
// removes the requests before it, except RDMA Reads, because a completion stands for all of
// them.
func (e *Endpoint) forget(wc *ibv.WC) {
	e.mu.Lock()
	defer e.mu.Unlock()
	at := slices.IndexFunc(e.sends, func(w posted) bool { return w.id == wc.ID })
	if at < 0 {
		return
	}
	read := e.sends[at].op == ibv.OpRead
	e.sends = slices.Delete(e.sends, at, at+1)
	if read {
		return
	}
	kept := e.sends[:0]
	for i, w := range e.sends {
		if i >= at || w.op == ibv.OpRead {
			kept = append(kept, w)
		}
	}
	e.sends = kept
}

// qp is a queue pair whose posts are scripted.
type qp struct {
	ibv.QP
	e *Endpoint
}

func (q *qp) PostSend(wrs []ibv.SendWR) (int, error) {
	if err := q.aboutToSend(wrs); err != nil {
		return 0, err
	}
	return q.QP.PostSend(wrs)
}

// aboutToSend does what the script says of a post of sends, and records it.
func (q *qp) aboutToSend(wrs []ibv.SendWR) error {
	s := q.e.script()
	if s.gate != nil {
		q.e.wait(s.gate)
		s = q.e.script()
	}
	if s.postSend != nil {
		if err := s.postSend(wrs); err != nil {
			return err
		}
	}
	q.e.note(wrs) // They are recorded before one of them can complete.
	return nil
}

// PostInPlace implements ibv.InPlaceQP. Without that of the device it is PostSend.
func (q *qp) PostInPlace(wrs []ibv.SendWR) (n int, lent bool, err error) {
	if err := q.aboutToSend(wrs); err != nil {
		return 0, false, err
	}
	if p, ok := q.QP.(ibv.InPlaceQP); ok {
		return p.PostInPlace(wrs)
	}
	n, err = q.QP.PostSend(wrs)
	return n, false, err
}

func (q *qp) Flush() (left int, err error) { return q.QP.(ibv.InPlaceQP).Flush() }
func (q *qp) FlushInterrupt()              { q.QP.(ibv.InPlaceQP).FlushInterrupt() }
func (q *qp) Keep() (left int, err error)  { return q.QP.(ibv.InPlaceQP).Keep() }

// StopHolding passes the call on to a queue pair that has it.
func (q *qp) StopHolding() {
	if h, ok := q.QP.(ibv.HoldingQP); ok {
		h.StopHolding()
	}
}

// SendsHaveRoom passes the call on to a queue pair that has it.
func (q *qp) SendsHaveRoom() bool {
	h, ok := q.QP.(ibv.HoldingQP)
	return !ok || h.SendsHaveRoom()
}

// PeerHolds passes the call on to a queue pair that has it.
func (q *qp) PeerHolds() {
	if h, ok := q.QP.(ibv.HoldingQP); ok {
		h.PeerHolds()
	}
}

// CloseSends passes the call on to a queue pair that has it.
func (q *qp) CloseSends() error {
	if h, ok := q.QP.(ibv.HoldingQP); ok {
		return h.CloseSends()
	}
	return errors.ErrUnsupported
}

// PeerCloses passes the call on to a queue pair that has it.
func (q *qp) PeerCloses() {
	if h, ok := q.QP.(ibv.HoldingQP); ok {
		h.PeerCloses()
	}
}

func (q *qp) PostRecv(wrs []ibv.RecvWR) (int, error) {
	if f := q.e.script().postRecv; f != nil {
		if err := f(wrs); err != nil {
			return 0, err
		}
	}
	q.e.mu.Lock()
	if q.e.recvIDs == nil {
		q.e.recvIDs = make(map[uint64]bool)
	}
	for i := range wrs {
		q.e.recvIDs[wrs[i].ID] = true
	}
	q.e.recvs += len(wrs)
	q.e.mu.Unlock()
	return q.QP.PostRecv(wrs)
}

func (q *qp) RegMR(buf []byte, access ibv.Access) (ibv.MR, error) {
	return register(q.QP.RegMR, buf, access, q.e)
}

// Idle passes the call on to a queue pair that has it.
func (q *qp) Idle(unused func(buf []byte)) {
	if idle, ok := q.QP.(ibv.IdleQP); ok {
		idle.Idle(unused)
	}
}

func (e *Endpoint) wait(gate chan struct{}) {
	e.mu.Lock()
	e.blocked++
	e.mu.Unlock()
	<-gate
	e.mu.Lock()
	e.blocked--
	e.mu.Unlock()
}

// register registers memory, and calls the functions of the endpoints that it may concern.
func register(inner func([]byte, ibv.Access) (ibv.MR, error), buf []byte, access ibv.Access, ends ...*Endpoint) (ibv.MR, error) {
	m := &mr{}
	for _, e := range ends {
		if f := e.script().register; f != nil {
			closing, err := f(buf, access)
			if err != nil {
				return nil, err
			}
			if closing != nil {
				m.closing = append(m.closing, closing)
			}
		}
	}
	var err error
	m.MR, err = inner(buf, access)
	if err != nil {
		return nil, err
	}
	return m, nil
}

type mr struct {
	ibv.MR
	closing []func()
}

func (m *mr) Close() error {
	for _, f := range m.closing {
		f()
	}
	m.closing = nil
	return m.MR.Close()
}
