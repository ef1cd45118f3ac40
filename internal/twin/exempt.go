package twin

import (
	"cmp"
	"slices"
	"time"
)

// licence is a result that the oracle forbids, and that an exemption may permit.
type licence uint8

const (
	mayFail  licence = iota + 1 // mayFail: a call fails although the contract has no cause for it.
	mayLose                     // mayLose: a reader gets a reset in place of bytes that were taken and EOF.
	maySlow                     // maySlow: a call takes longer than its bound.
	mayStall                    // mayStall: nothing moves although nothing prevents it.
	mayCut                      // mayCut: a reader gets EOF in place of bytes that were taken.
	mayEnd                      // mayEnd: a reader gets EOF in place of an error.
	mayCount                    // mayCount: n is less than what the peer has read.
)

// An exemption is a case in which a network may do less than the contract requires.
type exemption struct {
	network string
	what    licence
	when    func(f *facts, c *Call) bool

	// row is the first cell of the row of docs/semantics.md, section Streams, that
	// describes the case.
	row string
}

// exemptions are all exemptions. The oracle knows no other difference between the networks.
var exemptions = []exemption{
	{"tcp", mayLose, tcpUnread, "Close with bytes unread"},
	{"tcp", mayFail, tcpUnread, "Close with bytes unread"},
	{"tcp", mayLose, tcpDeaf, "Read after CloseRead"},
	{"tcp", mayFail, tcpDeaf, "Read after CloseRead"},
	{"tcp", mayEnd, tcpTold, "Read after a reset that another call has reported"},
	{"tcp", mayStall, func(f *facts, _ *Call) bool { return f.anyCloseRead() }, "Read after CloseRead"},
	{"tcp", mayFail, func(f *facts, c *Call) bool { return c.Class == NotConn }, "CloseWrite and CloseRead when the connection is over"},
	{"rdma", mayLose, lingered, "after Close, a peer that takes nothing"},
	{"rdma", mayFail, lingered, "after Close, a peer that takes nothing"},
	{"rdma", maySlow, holdsOn, "a deadline, CloseWrite or Close in the middle of a large transfer"},
	{"rdma", mayLose, brokenOff, "a deadline, CloseWrite or Close in the middle of a large transfer"},
	{"rdma", maySlow, queuedLarge, "a deadline of a queued send"},
	{"rdma", mayCount, untold, "n of a large Write when the connection is over"},
	{"rdma", mayFail, plainEnd, "the peer is not rdmanet"},
	{"tcp", mayStall, func(f *facts, _ *Call) bool { return f.p.ahead() }, "unread bytes until Write waits"},
	{"rdma", mayStall, largeAhead, "unread bytes until Write waits"},
	{"rdma", mayLose, exitUnread, "a process that ends without Close"},
	{"rdma", mayLose, exitMetSetUp, "a process that ends without Close"},
	{"rdma", mayLose, exitOnDevice, "a process that ends without Close"},
	{"rdma", mayCut, exitCutShort, "Write, and the process ends without Close"},
}

// allowed reports whether there is an exemption.
func (f *facts) allowed(what licence, c *Call) bool {
	for _, e := range exemptions {
		if e.network == f.t.Network && e.what == what && e.when(f, c) {
			return true
		}
	}
	return false
}

// tcpUnread is TCP's reset of a connection that was closed before everything was read,
// or to which the peer wrote afterwards.
func tcpUnread(f *facts, c *Call) bool {
	me, peer := &f.ends[c.End], &f.ends[1-c.End]
	return (c.Class == ResetByPeer || c.Class == Pipe) && peer.closed <= c.Return && me.most+asked(f, c.End) > peer.closedN
}

// tcpDeaf is Linux's reset of a connection on which bytes arrive after CloseRead and
// CloseWrite.
func tcpDeaf(f *facts, c *Call) bool {
	return (c.Class == ResetByPeer || c.Class == Pipe) && min(f.ends[0].closeRead, f.ends[1].closeRead) <= c.Return
}

// tcpTold is a property of Linux: a socket reports a reset once, to the first call in
// either direction, and reads EOF from then on. That call may return later than the one
// that reads EOF.
func tcpTold(f *facts, c *Call) bool { return f.ends[c.End].told <= c.Return }

// exitUnread is the same reset, of a process that has ended without Close.
func exitUnread(f *facts, c *Call) bool {
	return f.ends[1-c.End].exited <= c.Return && tcpUnread(f, c)
}

// exitMetSetUp is the reset of a process that ended before it had received the last message of the
// set-up, which the end that dials sends.
func exitMetSetUp(f *facts, c *Call) bool {
	peer, dialed := &f.ends[1-c.End], (c.End == 1) == f.p.Swap
	return c.Class == ResetByPeer && peer.exited <= c.Return && dialed && !peer.heard
}

// exitOnDevice is the end of a process whose device ends with it, and loses what the other device
// has not acknowledged.
func exitOnDevice(f *facts, c *Call) bool {
	return (c.Class == ResetByPeer || c.Class == Pipe) && f.ends[1-c.End].exited <= c.Return && !f.t.Held
}

// exitCutShort is the end of a process whose last calls were cut short. What the kernel had no
// room for of their bytes was in the process.
func exitCutShort(f *facts, c *Call) bool {
	peer := &f.ends[1-c.End]
	return peer.exited <= c.Return && peer.inProcess > 0 && f.readBy(c) >= peer.taken-peer.inProcess
}

// largeAhead is for large writes of more than 1 MiB that nobody reads.
func largeAhead(f *facts, _ *Call) bool {
	if !f.p.ahead() || f.t.Held {
		return false
	}
	var n [2]int64
	for i := range f.t.Calls {
		c := &f.t.Calls[i]
		if !c.Do.writes() || !f.large(c) {
			continue
		}
		if n[c.End] += c.N; c.N < c.Asked {
			n[c.End] += cmp.Or(c.Each, c.Asked-c.N) // It waits for room for this.
		}
	}
	return max(n[0], n[1]) > 1<<20
}

// asked is how many bytes the calls of an end have tried to write and did not.
func asked(f *facts, end int) (n int64) {
	for i := range f.t.Calls {
		if c := &f.t.Calls[i]; c.End == end && c.Do.writes() && c.Class != BadAddress && c.Class != TooLong {
			n += c.Asked - c.N
		}
	}
	return n
}

// lingered is a reset by a peer whose linger time is over.
func lingered(f *facts, c *Call) bool {
	return (c.Class == ResetByPeer || c.Class == Pipe) && f.lingerOver(c)
}

// lingerOver reports whether the linger time of the peer's Close may have been over when a
// call returned.
func (f *facts) lingerOver(c *Call) bool {
	closed := f.ends[1-c.End].closed
	return closed != never && c.Return >= closed+f.p.end(1-c.End).Setup.linger()-50*time.Millisecond
}

// holdsOn is for a call that gives up a large transfer whose peer is silent. The peer's
// device may use the memory. The call waits 5 s in all, and 1 s after Close. A peer behind
// a link that stops for a while is as silent.
func holdsOn(f *facts, c *Call) bool {
	if !f.lends(c) {
		return false
	}
	d, closed := f.overdue(c), max(f.ends[c.End].closed, c.Start)
	if f.freeze > c.Return {
		since := min(d, closed)
		return c.Return-since <= f.overrun()+f.slack()+f.stood(since, c.Return)+f.behind(c, since)
	}
	late := 500*time.Millisecond + f.slack()
	if d != never && c.Return > max(f.freeze, d)+5*time.Second+late {
		return false
	}
	return c.Return <= closed || c.Return <= max(f.freeze, closed)+time.Second+late
}

// stood returns for how long the link carried nothing between two moments, or the process of an
// end was stopped.
func (f *facts) stood(from, to time.Duration) (sum time.Duration) {
	for _, e := range f.t.Link {
		if e.Do == Stop {
			sum += Span{e.When, e.For}.within(from, to)
		}
	}
	return sum + f.suspended(from, to)
}

// behind returns how long the link takes for what the peer had written and the caller's end
// had not read when the call was due. The peer's answer comes behind that, and so may the
// requests of RDMA Reads that it answers for. The peer can send what the caller's end has
// receives for, or what that end has asked for of a large transfer.
func (f *facts) behind(c *Call, due time.Duration) time.Duration {
	if f.p.Link.Rate <= 0 {
		return 0
	}
	var n int64
	for i := range f.t.Calls {
		switch d := &f.t.Calls[i]; {
		case d.End != c.End && d.Do.writes() && d.Start <= c.Return:
			n += d.N
		case d.End == c.End && d.Do.reads() && d.Return <= due:
			n -= d.N
		}
	}
	most := max(f.p.end(c.End).Setup.window(), 128<<10)
	return time.Duration(2*max(0, min(n, most))) * time.Second / time.Duration(f.p.Link.Rate)
}

// brokenOff is a reset by a peer that was closed in the middle of a large transfer. The
// peer has waited 1 s for this end to let go of the memory, but no goroutine that could do
// that got a processor, or this end's process was stopped.
func brokenOff(f *facts, c *Call) bool {
	closed := f.ends[1-c.End].closed
	silent := 3*f.t.Noise >= time.Second || f.suspended(closed, c.Return) >= time.Second-f.slack()
	if !silent || closed > c.Return || c.Class != ResetByPeer && c.Class != Pipe {
		return false
	}
	return slices.ContainsFunc(f.t.Calls, func(d Call) bool {
		return d.End != c.End && d.Class == Closed && d.Return >= closed+time.Second && f.lends(&d)
	})
}

// queuedLarge is for a queued send that is large, or that follows a large one. The results
// are waited for in order.
func queuedLarge(f *facts, c *Call) bool {
	return c.Do == Queue && slices.ContainsFunc(f.t.Calls, func(q Call) bool {
		return q.End == c.End && q.Do == Queue && q.Start <= c.Start && q.Return >= c.Start && f.large(&q)
	})
}

// lends reports whether a device may use the memory of a call's caller: that of a large
// write, or of a read with as much room that runs beside a large write of the peer. That
// write may have returned before.
func (f *facts) lends(c *Call) bool {
	switch {
	case !f.large(c), c.Do == ReadFrom, c.Do == WriteTo: // These two use memory of rdmanet.
		return false
	case c.Do.writes():
		return true
	}
	return slices.ContainsFunc(f.t.Calls, func(w Call) bool {
		return w.End != c.End && w.Do.writes() && w.Start <= c.Return && f.large(&w)
	})
}

// large reports whether a call has enough bytes, or enough room, for a large transfer.
func (f *facts) large(c *Call) bool {
	if !c.Do.writes() && !c.Do.reads() {
		return false
	}
	least := int64(f.p.end(c.End).Setup.TransferSize)
	switch {
	case least < 0:
		return false
	case least == 0:
		least = 128 << 10 // From this length on anything is a large transfer by itself.
	case c.Do.message():
		least = min(least, 128<<10) // What is too long for segments is a large transfer.
	case c.Do.reads():
		least = min(least, 512<<10) // That is enough room.
	}
	if c.Each > 0 {
		return c.Each >= least
	}
	return c.Asked >= least
}

// untold is for a large Write that failed because the connection was over, or failed before
// the peer could report how much it had fetched.
func untold(f *facts, c *Call) bool {
	if !f.large(c) {
		return false
	}
	switch c.Class {
	case Pipe, ResetByPeer, TimedOut, Closed:
		return true
	case Deadline:
		return min(f.freeze, f.reset, f.ends[1-c.End].closed) <= c.Return
	}
	return false
}

// plainEnd is for peers that have no half-close and no other end than a disconnect.
func plainEnd(f *facts, c *Call) bool { return f.p.Peer != Rdmanet && c.Class == Unsupported }

func (f *facts) anyCloseRead() bool {
	return f.ends[0].closeRead != never || f.ends[1].closeRead != never
}
