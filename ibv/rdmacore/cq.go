//go:build linux && cgo

package rdmacore

// #include "shim.h"
import "C"

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/rdmanet/rdmanet/ibv"
)

// cq implements ibv.CQ with a completion channel of its own, so that the runtime's poller
// wakes the goroutine that waits.
type cq struct {
	dev     *device
	handle  C.uintptr_t
	depth   int
	overrun atomic.Bool

	mu    sync.Mutex      // mu is held by poll, arm and close.
	c     *C.struct_rn_cq // c is nil once the queue is closed.
	users int
	armed bool
	wcs   [32]C.struct_rn_wc

	qps  map[uint32]*qp // qps are the queue pairs that complete here.
	kept []ibv.WC       // kept are completions that were taken from the device before Poll asked for them.
	dead []*qp          // dead are queue pairs in the error state whose ledgers must be flushed.

	datagrams, connections bool // whose queue pairs complete here, or did

	file *os.File // file is the channel.
	raw  syscall.RawConn

	// These fields are for the goroutine that waits.
	take    func(uintptr) bool
	taken   int   // taken counts the events of this Wait.
	failed  error // failed is the error if no event could be taken.
	unacked C.uint

	// due is how many events may be in the channel. Each Arm adds one. When the channel is
	// found empty, one event is still to come. If the number is too small, an event is
	// left to the next Wait.
	due atomic.Int32

	wait waitState
}

// waitState is shared by the goroutine that waits and those that wake it.
type waitState struct {
	sync.Mutex
	asleep      bool
	interrupted bool
	raised      bool // raised is set for an event that this package has raised itself.
	dirty       bool // dirty is set while the file has a deadline.
	closed      bool
}

// roused returns the result of a Wait that was woken. The event has precedence.
func (w *waitState) roused() error {
	if w.raised {
		w.raised = false
		return nil
	}
	w.interrupted = false
	return ibv.ErrInterrupted
}

var noDeadline time.Time

func (d *device) CreateCQ(depth int) (ibv.CQ, error) {
	if depth < 1 {
		return nil, fmt.Errorf("%s: create completion queue: depth %d: %w", d.name, depth, syscall.EINVAL)
	}
	if depth > d.attr.MaxCQE {
		return nil, fmt.Errorf("%s: create completion queue: depth %d (limit %d): %w", d.name, depth, d.attr.MaxCQE, ibv.ErrLimit)
	}
	c := &cq{dev: d, qps: make(map[uint32]*qp)}
	c.handle = addHandle(c)
	if err := errno(C.rn_create_cq(d.c, C.int(depth), C.int(d.vector()), c.handle, &c.c)); err != nil {
		removeHandle(c.handle)
		return nil, fmt.Errorf("%s: create completion queue: %w", d.name, memoryError(err))
	}
	c.depth = int(c.c.cqe)
	var err error
	if c.file, err = pollable(int(c.c.channel.fd), "completion channel"); err == nil {
		c.raw, err = c.file.SyscallConn()
	}
	if err != nil {
		removeHandle(c.handle)
		c.file.Close()
		C.rn_destroy_cq(c.c, 0, 1)
		return nil, fmt.Errorf("%s: create completion queue: %w", d.name, err)
	}
	c.take = c.takeEvents
	return c, nil
}

func (c *cq) Depth() int { return c.depth }

// use adds a queue pair. It returns an error if the queue is closed.
func (c *cq) use() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.c == nil {
		return net.ErrClosed
	}
	c.users++
	return nil
}

func (c *cq) unuse() {
	c.mu.Lock()
	c.users--
	c.mu.Unlock()
}

// Flags of enum ibv_wc_flags and numbers of enum ibv_wc_opcode.
const (
	wcGRH     = 1 << 0
	wcWithImm = 1 << 1
	wcWithInv = 1 << 3

	wcRecv        = 1 << 7
	wcRecvWithImm = wcRecv + 1
)

var wcOps = [...]ibv.WCOpcode{0: ibv.WCSend, 1: ibv.WCWrite, 2: ibv.WCRead, 3: ibv.WCCmpSwap, 4: ibv.WCFetchAdd, 6: ibv.WCLocalInv}

func (c *cq) Poll(wcs []ibv.WC) (total int, err error) {
	for {
		c.mu.Lock()
		n, failed, err := c.poll(wcs[total:])
		c.mu.Unlock()
		total += n
		for _, q := range failed {
			q.fail()
		}
		if err != nil || len(failed) == 0 {
			return total, err
		}
	}
}

// poll also returns the queue pairs that are found to be in the error state.
// Called with c.mu held.
func (c *cq) poll(wcs []ibv.WC) (total int, failed []*qp, err error) {
	if c.c == nil {
		return 0, nil, net.ErrClosed
	}
	total = copy(wcs, c.kept)
	c.kept = slices.Delete(c.kept, 0, total)
	for total < len(wcs) {
		want := min(len(wcs)-total, len(c.wcs))
		n := c.dev.pollCQ(c.c, c.wcs[:want])
		if n < 0 || c.overrun.Load() {
			return total, failed, fmt.Errorf("%s: %w", c.dev.name, ibv.ErrCQOverrun)
		}
		for i := range c.wcs[:n] {
			w, wc := &c.wcs[i], &wcs[total]
			translate(w, wc)
			if c.datagrams {
				c.addSource(w, wc)
			}
			if c.dev.siw || wc.Status != ibv.WCSuccess {
				q := c.qps[wc.QPN]
				if q != nil && wc.Status != ibv.WCSuccess && !q.failed.Load() {
					failed = append(failed, q)
				}
				if c.dev.siw && (q == nil || !q.settle(wc, w.opcode&wcRecv != 0)) {
					continue
				}
			}
			total++
		}
		if n < want {
			// A queue pair in the list gets no more completions from the device.
			for _, q := range c.dead {
				total += q.flush(c, wcs[total:])
			}
			break
		}
	}
	return total, failed, nil
}

// join notes that the queue pair completes here.
func (c *cq) join(q *qp) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.qps[q.num] = q
	c.datagrams = c.datagrams || q.ud
	c.connections = c.connections || !q.ud
}

// leave removes a queue pair that is about to be destroyed. It takes the completions first,
// because they depend on the queue pair: some devices drop them, and siw uses numbers
// again. It returns the queue pairs that are found to be in the error state.
func (c *cq) leave(q *qp) (failed []*qp) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dead = slices.DeleteFunc(c.dead, func(f *qp) bool { return f == q })
	var wcs [32]ibv.WC
	kept := c.kept
	c.kept = nil
	for {
		n, f, err := c.poll(wcs[:])
		kept, failed = append(kept, wcs[:n]...), append(failed, f...)
		if n == 0 || err != nil {
			break
		}
	}
	c.kept = kept
	delete(c.qps, q.num)
	return failed
}

// flushes makes Poll flush what is left in the queue pair's ledgers.
func (c *cq) flushes(q *qp) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !slices.Contains(c.dead, q) {
		c.dead = append(c.dead, q)
	}
	if c.armed && q.unsettled(c) {
		c.armed = false
		c.rouse(func() { c.wait.raised = true })
	}
}

// rouse ends the Wait in progress. It calls why with the lock held.
func (c *cq) rouse(why func()) {
	w := &c.wait
	w.Lock()
	defer w.Unlock()
	why()
	if w.asleep && !w.closed {
		w.dirty = true
		c.file.SetReadDeadline(time.Unix(1, 0))
	}
}

// translate converts a completion to the type of package ibv.
func translate(w *C.struct_rn_wc, wc *ibv.WC) {
	*wc = ibv.WC{ID: uint64(w.wr_id), Status: ibv.WCStatus(w.status), VendorErr: uint32(w.vendor_err), QPN: uint32(w.qp_num)}
	if wc.Status != ibv.WCSuccess {
		return
	}
	wc.ByteLen = uint32(w.byte_len)
	switch {
	case w.opcode == wcRecv:
		wc.Op = ibv.WCRecv
	case w.opcode == wcRecvWithImm:
		wc.Op = ibv.WCRecvWriteImm
	case int(w.opcode) < len(wcOps):
		wc.Op = wcOps[w.opcode]
	}
	if w.wc_flags&wcWithImm != 0 {
		wc.Flags |= ibv.WCWithImm
		wc.Imm = networkOrder(uint32(w.imm_or_key))
	}
	if w.wc_flags&wcWithInv != 0 {
		wc.Flags |= ibv.WCWithInv
		wc.InvKey = uint32(w.imm_or_key)
	}
}

// networkOrder returns a number whose bytes in memory are those of n in network order. It
// is its own inverse.
func networkOrder(n uint32) uint32 {
	return binary.BigEndian.Uint32((*[4]byte)(unsafe.Pointer(&n))[:])
}

func (c *cq) Arm(solicitedOnly bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.c == nil {
		return net.ErrClosed
	}
	c.armed = true
	c.due.Add(1)
	// siw accepts the request for solicited events, and never raises one.
	solicitedOnly = solicitedOnly && c.dev.solicited()
	err := c.dev.armCQ(c.c, solicitedOnly)
	if err != nil && solicitedOnly {
		// mana and efa refuse it. So all events are requested, and none is missed.
		if err = c.dev.armCQ(c.c, false); err == nil {
			c.dev.unsolicited.Store(true)
		}
	}
	if err != nil {
		return fmt.Errorf("%s: arm completion queue: %w", c.dev.name, err)
	}
	return nil
}

func (c *cq) Wait(deadline time.Time) error {
	w := &c.wait
	w.Lock()
	if w.closed {
		w.Unlock()
		return net.ErrClosed
	}
	if w.interrupted || w.raised {
		defer w.Unlock()
		return w.roused()
	}
	w.asleep = true
	if w.dirty || !deadline.IsZero() {
		c.file.SetReadDeadline(deadline)
		w.dirty = !deadline.IsZero()
	}
	w.Unlock()

	c.taken, c.failed = 0, nil
	err := c.raw.Read(c.take)

	w.Lock()
	defer w.Unlock()
	w.asleep = false
	switch {
	case c.taken > 0:
		return nil
	case w.closed:
		return net.ErrClosed
	case w.interrupted || w.raised:
		return w.roused()
	case c.failed != nil:
		return fmt.Errorf("%s: wait for completions: %w", c.dev.name, c.failed)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return os.ErrDeadlineExceeded
	}
	return fmt.Errorf("%s: wait for completions: %w", c.dev.name, err)
}

// takeEvents takes all events that may be there, because the poller reports new ones only.
func (c *cq) takeEvents(uintptr) bool {
	for {
		switch rc := c.dev.takeEvent(c.c); rc {
		case 0:
			c.taken++
			if c.unacked++; c.unacked == 1<<16 {
				C.rn_ack_cq(c.c, c.unacked)
				c.unacked = 0
			}
			if c.due.Add(-1) <= 0 {
				return true
			}
		case -C.int(syscall.EINTR):
		case -C.int(syscall.EAGAIN):
			c.due.Store(1)
			return c.taken > 0
		default:
			c.failed = errno(rc)
			return true
		}
	}
}

func (c *cq) Interrupt() {
	c.rouse(func() { c.wait.interrupted = true })
}

func (c *cq) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.c == nil:
		return net.ErrClosed
	case c.users > 0:
		return fmt.Errorf("%s: close completion queue: %d queue pairs: %w", c.dev.name, c.users, ibv.ErrBusy)
	}
	c.wait.Lock()
	c.wait.closed = true
	c.wait.Unlock()
	c.file.Close() // Close ends a Wait, and returns when the Wait is out of C.
	removeHandle(c.handle)
	err := errno(C.rn_destroy_cq(c.c, c.unacked, 1))
	c.c = nil
	if err != nil {
		return fmt.Errorf("%s: close completion queue: %w", c.dev.name, err)
	}
	return nil
}
