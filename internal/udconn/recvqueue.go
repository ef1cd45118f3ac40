package udconn

import (
	"net/netip"
	"sync/atomic"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/cqwait"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

const (
	// ReceiveSlots is how many receives a queue pair has, unless there is little memory to
	// register or the device has shorter queues.
	ReceiveSlots    = 256
	minReceiveSlots = 16

	// SlotSize is the length of a receive in bytes: room for any datagram, whatever the MTU
	// will be, and a multiple of a cache line. 4096 bytes is the largest MTU of InfiniBand
	// and RoCE.
	SlotSize   = (ibv.GRHLen + maxPayload + 63) &^ 63
	maxPayload = 4096
)

// recvQueue is the receive half of a queue pair. Its receives are always posted: each is
// posted again as soon as its datagram has been copied to the inbox.
type recvQueue struct {
	to      *receiver
	senders senders
	failed  func(error) // failed has the queue pair dropped.
	device  string
	zone    string // zone is that of link-local addresses there.

	qp  ibv.QP
	cq  ibv.CQ
	mem *regmem.Buffer

	sent atomic.Bool // sent is set if something was sent since a datagram has arrived.

	// receiver.mu guards these fields.
	wait    cqwait.Waiter
	dropped bool                // dropped is set if the queue pair is of no use any more.
	groups  map[netip.Addr]bool // groups are joined; the value is false for those to send to only.
	origins map[netip.Addr]bool // origins are the addresses that datagrams to groups are sent from.
	slots   []ibv.SGE
	wcs     [32]ibv.WC
	reposts [32]ibv.RecvWR
}

// senders finds the senders of datagrams. receiver.mu is held in all calls.
type senders interface {
	// tick is called before sender. It makes the current time known.
	tick()

	// sender returns the address that a datagram is from, and whether this Conn has sent it
	// to a group itself. ok is false for a datagram that nobody can be answered for.
	sender(host, to netip.Addr, wc *ibv.WC) (from netip.AddrPort, own, ok bool)
}

// acquire creates the completion queue. mem has room for n receives.
func (q *recvQueue) acquire(dev ibv.Device, mem *regmem.Buffer, n int) (err error) {
	q.mem = mem
	q.slots = make([]ibv.SGE, n)
	for i := range q.slots {
		q.slots[i] = ibv.SGE{Buf: mem.B[i*SlotSize:][:SlotSize:SlotSize], LKey: mem.LKey}
	}
	q.cq, err = dev.CreateCQ(n)
	return err
}

// post posts all receives.
func (q *recvQueue) post(qp ibv.QP) error {
	q.qp = qp
	wrs := make([]ibv.RecvWR, len(q.slots))
	for i := range wrs {
		wrs[i] = ibv.RecvWR{ID: uint64(i), SGL: q.slots[i : i+1]}
	}
	_, err := qp.PostRecv(wrs)
	return err
}

// start readies the wait for completions.
func (q *recvQueue) start(cfg cqwait.Config) {
	cfg.Owner, cfg.CQ, cfg.Lock, cfg.Groups = (*recvOwner)(q), q.cq, &q.to.mu, []*cqwait.Group{&q.to.readers}
	q.wait.Init(cfg)
}

// over implements source.
func (q *recvQueue) over() bool { return q.dropped }

// answerDue implements source.
func (q *recvQueue) answerDue() bool { return q.sent.Load() }

// waiter implements source.
func (q *recvQueue) waiter() *cqwait.Waiter { return &q.wait }

// poll implements source.
func (q *recvQueue) poll() (total int) {
	in := &q.to.in
	for !q.dropped {
		n, err := q.cq.Poll(q.wcs[:])
		if err != nil {
			q.fail(err)
			break
		}
		if n == 0 {
			break
		}
		total += n
		q.senders.tick()
		again := 0
		for i := range q.wcs[:n] {
			wc := &q.wcs[i]
			if wc.Status != ibv.WCSuccess {
				q.fail(&ibv.WCError{Status: wc.Status, Op: ibv.WCRecv, ID: wc.ID, VendorErr: wc.VendorErr, Device: q.device})
				continue
			}
			q.received(wc)
			q.reposts[again] = ibv.RecvWR{ID: wc.ID, SGL: q.slots[wc.ID : wc.ID+1]}
			again++
		}
		if _, err := q.qp.PostRecv(q.reposts[:again]); err != nil {
			q.fail(err)
		}
		if n < len(q.wcs) || in.len() > 0 && !q.wait.InBackground() {
			break
		}
	}
	if in.len() > 0 {
		q.sent.Store(false)
	}
	q.to.wakeReaders()
	return total
}

// received delivers the datagram of a completed receive.
func (q *recvQueue) received(wc *ibv.WC) {
	host, to, payload, ok := openDatagram(wc, q.slots[wc.ID].Buf)
	if ok && host.IsLinkLocalUnicast() && host.Is6() {
		host = host.WithZone(q.zone)
	}
	var from netip.AddrPort
	own := false
	if ok {
		from, own, ok = q.senders.sender(host, to, wc)
	}
	if !ok {
		q.to.strays.Add(1)
		return
	}
	q.to.deliver(from, own, payload)
}

// fail has the queue pair dropped, once. The caller holds receiver.mu.
func (q *recvQueue) fail(err error) {
	if !q.dropped {
		q.dropped = true
		q.failed(err)
	}
}

// joined notes that a group was joined from an address.
func (q *recvQueue) joined(from, group netip.Addr, member bool) {
	q.to.mu.Lock()
	defer q.to.mu.Unlock()
	if q.groups == nil {
		q.groups, q.origins = make(map[netip.Addr]bool), make(map[netip.Addr]bool)
	}
	q.origins[from.WithZone("")] = true
	q.groups[group] = member
}

// left notes that a group was left.
func (q *recvQueue) left(group netip.Addr) {
	q.to.mu.Lock()
	defer q.to.mu.Unlock()
	delete(q.groups, group)
}

// receives returns the number of receives.
func (q *recvQueue) receives() int { return len(q.slots) }

// recvOwner is a recvQueue as package cqwait uses it.
type recvOwner recvQueue

func (o *recvOwner) Poll() int {
	if o.to.closed.Load() {
		return 0
	}
	return (*recvQueue)(o).poll()
}

func (o *recvOwner) Arrived() bool     { return o.to.in.len() > 0 }
func (o *recvOwner) Stopped(bool) bool { return o.dropped || !o.to.idle() }
func (o *recvOwner) Over() bool        { return o.dropped || o.to.closed.Load() }
func (o *recvOwner) Silent() bool      { return o.Over() }
func (o *recvOwner) Solicited() bool   { return false }
func (o *recvOwner) Background() bool  { return !o.Over() }
func (o *recvOwner) Failed(err error)  { (*recvQueue)(o).fail(err) }
