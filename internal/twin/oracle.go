package twin

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/rdmanet/rdmanet/internal/defect"
)

const (
	// deadlineBound is how much later than its deadline, or than the Close of its end, a
	// call may return on a link of bulkRate or more.
	deadlineBound = 250 * time.Millisecond
	bulkRate      = 1 << 20

	// closeBound bounds Close, and other calls that do not wait for the peer.
	closeBound = 100 * time.Millisecond

	// setUpBound is how long a set-up that fails may take. A longer time can be the fault
	// of a busy machine.
	setUpBound = 5 * time.Second
)

const never = time.Duration(math.MaxInt64)

// A Violation is a result that the contract does not permit.
type Violation struct {
	Rule string
	Text string

	// Timing is set if a call took too long. It counts if it occurs again.
	Timing bool
}

// ofBytes has the rules that are broken if bytes are lost or wrong.
var ofBytes = []string{
	"bytes", "bytes, and their number", "n is what was taken",
	"what was written before Close arrives, then EOF", "EOF comes behind all that was written",
}

// String returns the rule and what was found.
func (v Violation) String() string {
	text := v.Rule + ": " + v.Text
	if slices.Contains(ofBytes, v.Rule) {
		return defect.Prefix + text
	}
	return text
}

// facts is what the oracle knows of a trace.
type facts struct {
	p    *Program
	t    *Trace
	ends [2]endFacts
	// These are the times at which the link did this first.
	reset, freeze time.Duration
}

// endFacts is what one end has done. Times are the beginning of the first such call.
type endFacts struct {
	closed, closeWrite, closeRead time.Duration
	closedN                       int64         // closedN is how many bytes this end had read when Close began.
	taken, most                   int64         // taken and most bound the bytes that its calls have taken.
	read                          int64         // read is how many bytes it has read.
	open                          bool          // open is set if its last message has no end.
	pieces                        bool          // pieces is set if a message was sent in pieces.
	cut                           time.Duration // cut is when one of its messages was cut.
	over                          time.Duration // over is when Close had returned.
	dead                          time.Duration // dead is when a call reported that the connection is over.
	lost                          time.Duration // lost is when a call reported an end after which nothing can be read.
	told                          time.Duration // told is when the first call began that reported the end.
	broke                         time.Duration // broke is when it sent a malformed message.
	exited                        time.Duration // exited is when its process ended without Close.
	inProcess                     int64         // inProcess is how many of its bytes the kernel may not have had at the end.
	heard                         bool          // heard is set if a call shows that something of the other end has come.
}

// mostInProcess is how many bytes of calls that were cut short wait in the process at most. The
// segments of programs are shorter.
const mostInProcess = 256 << 10

// Judge returns the results in a trace that the contract of net.Conn does not permit.
func Judge(p *Program, t *Trace) []Violation {
	f := gather(p, t)
	var vs []Violation
	found := func(timing bool, rule, format string, args ...any) {
		vs = append(vs, Violation{rule, fmt.Sprintf(format, args...), timing})
	}
	if t.Failed != "" {
		found(t.Duration > setUpBound, "connection set-up", "%s", t.Failed)
		return vs
	}
	if t.Hang != "" {
		found(false, "calls return after Close", "%v", t.Hang)
	}
	if t.Died != "" {
		found(false, "a process ends when it is told to", "%s", t.Died)
	}
	if t.GaveUp > 0 && !p.Link.frozen() && !f.allowed(mayStall, nil) {
		found(false, "what is written arrives", "nothing had moved for long at %.0f ms: end 0 has written %d and read %d bytes, end 1 %d and %d",
			ms(t.GaveUp), f.ends[0].taken, f.ends[0].read, f.ends[1].taken, f.ends[1].read)
	}
	for i := range t.Calls {
		c := &t.Calls[i]
		if f.foreign(c.End) {
			f.judgeForeign(c, found)
			continue
		}
		if c.Wrong != "" {
			found(false, "bytes, and their number", "%v", c)
		}
		if c.Shape != "" {
			found(false, "errors are a *net.OpError, and timeouts say so", "%v", c)
		}
		f.judgeResult(c, found)
		f.judgeTime(c, found)
	}
	for i := range t.Calls {
		if c := &t.Calls[i]; c.Do.writes() && c.More == 0 && f.allowed(mayCount, c) {
			f.ends[c.End].most += c.Asked - c.N
		}
	}
	for r := range f.ends {
		s := &f.ends[1-r]
		if f.ends[r].read > s.most {
			found(false, "n is what was taken", "end %d has read %d bytes, but the calls of end %d have taken %d", r, f.ends[r].read, 1-r, s.most)
		}
	}
	return vs
}

// foreign reports whether the end is a peer that is not rdmanet.
func (f *facts) foreign(end int) bool {
	return end == 1 && f.p.Peer != Rdmanet && f.t.Network == "rdma"
}

func gather(p *Program, t *Trace) *facts {
	f := &facts{p: p, t: t, reset: never, freeze: never}
	for i := range f.ends {
		f.ends[i] = endFacts{closed: never, closeWrite: never, closeRead: never, cut: never, over: never, dead: never, lost: never, told: never, broke: never, exited: never}
	}
	for _, e := range t.Link {
		switch {
		case e.Do == Reset:
			f.reset = min(f.reset, e.When)
		case e.Do == Freeze:
			f.freeze = min(f.freeze, e.When)
		}
	}
	for i := range t.Calls {
		c := &t.Calls[i]
		e := &f.ends[c.End]
		switch {
		case c.Do == Close:
			e.closed = min(e.closed, c.Start)
			if c.Class == OK {
				e.over = min(e.over, c.Return)
			}
		case c.Do == Exit:
			e.exited, e.closed = c.Start, min(e.closed, c.Start) // The process ends as if it called Close.
		case c.Do == CloseWrite:
			e.closeWrite = min(e.closeWrite, c.Start)
		case c.Do == CloseRead:
			e.closeRead = min(e.closeRead, c.Start)
		case c.Do.reads():
			e.read += c.N
		case c.Do.writes():
			e.pieces = e.pieces || c.Piece
			e.taken += c.N
			e.most += c.N + c.More
			switch {
			case c.Do == Malformed:
				e.broke = min(e.broke, c.Start)
			case c.Class != OK && (c.More > 0 || c.N > 0 && (c.Do == Pieces || c.Do == TryMsg || c.Do == Queue)):
				e.cut = min(e.cut, c.Start)
			}
			switch {
			case c.Do == TryMsg, c.Class == Deadline, c.Class == Pipe, c.Class == Closed:
				e.inProcess = min(e.inProcess+c.N, mostInProcess)
			case c.Class != Ended:
				e.inProcess = 0 // The call has waited for the kernel.
			}
			switch c.Do {
			case Pieces, TryMsg:
				if c.N > 0 {
					e.open = c.Piece
				}
			default:
				if c.N > 0 {
					e.open = false
				}
			}
		}
		if c.N > 0 && (c.Do.reads() || c.Class == OK && c.Do != TryMsg) {
			e.heard = true // The end that listens sends when the set-up is over.
		}
		switch c.Class {
		case EOF:
			e.heard = true
		case ResetByPeer, Pipe, TimedOut:
			if c.Do != CloseWrite && !(c.Class == Pipe && c.Do.writes() && e.closeWrite <= c.Return) {
				e.dead, e.told = min(e.dead, c.Return), min(e.told, c.Start)
				if c.Do.reads() || c.Class == TimedOut {
					e.lost = min(e.lost, c.Return)
				}
			}
		}
	}
	for i := range f.ends {
		e := &f.ends[i]
		for j := range t.Calls {
			if c := &t.Calls[j]; c.End == i && c.Do.reads() && c.Return <= e.closed {
				e.closedN += c.N
			}
		}
	}
	return f
}

type report func(timing bool, rule, format string, args ...any)

// judgeResult checks the result of a call.
func (f *facts) judgeResult(c *Call, found report) {
	me, peer := &f.ends[c.End], &f.ends[1-c.End]
	data := c.Do.writes() || c.Do.reads()
	if c.Do.writes() && c.N > c.Asked-c.Bad {
		found(false, "n is what was taken", "%v", c)
	}
	if data && (c.N < 0 || c.N > max(c.Asked, 0) && c.Do != WriteTo) {
		found(false, "n", "%v", c)
	}
	if c.Start > me.over && c.Class != Closed && c.Class != Unsupported && !(c.Asked == 0 && (c.Do == ReadFrom || c.Do == Buffers)) {
		found(false, "a call after Close fails with net.ErrClosed", "%v", c)
		return
	}
	permitted := false
	switch c.Class {
	case OK:
		permitted = true
		if c.Do.writes() && c.N < c.Asked && c.Do != TryMsg {
			found(false, "a write without an error takes everything", "%v", c)
		}
		if c.Do.reads() && c.N == 0 && c.Asked > 0 {
			found(false, "a read without an error brings something", "%v", c)
		}
		if c.Do.writes() && c.Start > f.returned(c.End, CloseWrite) {
			found(false, "a write after CloseWrite fails", "%v", c)
		}
	case EOF:
		f.judgeEnd(c, found)
		return
	case Deadline:
		permitted = f.due(c) <= c.Return
	case Closed:
		permitted = me.closed <= c.Return
	case Pipe, ResetByPeer:
		switch {
		case f.reset <= c.Return, me.lost < c.Return && c.Start >= me.lost:
			permitted = true
		case me.dead < c.Return && c.Start >= me.dead && !c.Do.reads():
			permitted = true // not for a read: what the peer wrote before the Close that a write has met is still to come
		case peer.broke <= c.Return && f.foreign(1-c.End):
			permitted = c.Do.writes() || c.Do == CloseWrite || f.readBy(c) >= peer.taken
		case c.Class == Pipe && c.Do.writes() && me.closeWrite <= c.Return:
			permitted = true
		case c.Do.writes(), c.Do == CloseWrite, c.Do == CloseRead:
			permitted = peer.closed <= c.Return || f.gone(1-c.End) <= c.Return
		case f.gone(1-c.End) <= c.Return:
			permitted = true
		case c.Do.reads() && peer.closed <= c.Return:
			// The stream ends by EOF, but where what the peer sent had no end.
			permitted = f.brokeOff(c) || f.allowed(mayLose, c)
			if !permitted {
				found(false, "what was written before Close arrives, then EOF",
					"%v; end %d had read %d of the %d bytes that end %d had taken from its caller", c, c.End, f.readBy(c), peer.taken, 1-c.End)
				return
			}
		}
	case TimedOut:
		permitted = f.silent(c)
	case BadAddress:
		permitted = c.Bad > 0 && f.stopped(c)
	case Ended:
		permitted = me.exited != never
	case Again:
		permitted = c.Do == TryMsg && c.N == 0
	case Short:
		permitted = c.Do == ReadMsg || c.Do == ReadPiece
	case TooLong:
		permitted = c.Do.writes() && c.Do.message() && c.Asked >= mayBeTooLong && c.N == 0
	case Unsupported:
		permitted = f.p.Peer != Rdmanet && (c.Do == CloseWrite || c.Do == Pieces)
	case Broken:
		permitted = (c.Do == ReadMsg || c.Do == ReadPiece) &&
			(me.closeRead <= c.Return || min(peer.closed, peer.closeWrite) <= c.Return && (f.brokeOff(c) || f.allowed(mayCut, c)))
	case Other:
		permitted = c.Do.writes() && me.cut <= c.Return || c.Do == CloseWrite && (me.cut <= c.Return || me.pieces)
	}
	if !permitted && !f.allowed(mayFail, c) {
		found(false, "the error has a cause", "%v", c)
	}
}

// judgeEnd checks an end of the stream.
func (f *facts) judgeEnd(c *Call, found report) {
	me, peer, read := &f.ends[c.End], &f.ends[1-c.End], f.readBy(c)
	switch {
	case !c.Do.reads():
		found(false, "only readers come to the end", "%v", c)
	case me.closeRead <= c.Return, f.allowed(mayEnd, c):
	case peer.broke <= c.Return && f.foreign(1-c.End):
		found(false, "a malformed message is an error, not the end", "%v", c)
	case min(peer.closeWrite, peer.closed) > c.Return:
		found(false, "the stream ends when the peer ends it", "%v", c)
	case read < peer.taken && !f.allowed(mayCut, c):
		found(false, "EOF comes behind all that was written", "%v; end %d had read %d of %d bytes", c, c.End, read, peer.taken)
	}
}

// judgeForeign checks a call of a peer that is not rdmanet. Such a peer only reports what
// has arrived. If rdmanet was closed first, everything has arrived. Then the connection is
// over, which the peer reports in several ways.
func (f *facts) judgeForeign(c *Call, found report) {
	me, peer := &f.ends[c.End], &f.ends[1-c.End]
	if !c.Do.reads() {
		return
	}
	if c.Wrong != "" {
		found(false, "bytes", "%v", c)
	}
	switch c.Class {
	case OK, Deadline, Closed:
		return
	}
	if f.p.Peer != Plain || peer.closed > c.Return || me.closed < peer.closed || min(f.reset, f.freeze) != never || f.lingerOver(c) {
		return
	}
	if read := f.readBy(c); read < peer.taken {
		found(false, "EOF comes behind all that was written", "%v; end %d had read %d of %d bytes", c, c.End, read, peer.taken)
	}
}

// readBy returns how many bytes an end had read when one of its calls returned.
func (f *facts) readBy(c *Call) (n int64) {
	for i := range f.t.Calls {
		if d := &f.t.Calls[i]; d.End == c.End && d.Do.reads() && d.Return <= c.Return {
			n += d.N
		}
	}
	return n
}

// brokeOff reports whether a read came to the place at which a message of the peer has no
// end.
func (f *facts) brokeOff(c *Call) bool {
	peer := &f.ends[1-c.End]
	if f.t.Held && peer.exited <= c.Return && c.Class != Broken {
		return false // The end of the process is an end like any other.
	}
	return (peer.open || peer.cut <= c.Return) && f.readBy(c) >= peer.taken
}

// stopped reports whether a call stopped where it should at memory that cannot be accessed: TCP
// may send less than what is in front of that. A read takes nothing, and so does a message.
func (f *facts) stopped(c *Call) bool {
	if f.t.Network == "tcp" && c.Do.writes() {
		return true
	}
	if c.Do == WriteMsg || c.Do.reads() {
		return c.N == 0
	}
	return c.N == c.Asked-c.Bad
}

// returned returns when the first successful call of a kind returned.
func (f *facts) returned(end int, do Kind) time.Duration {
	for i := range f.t.Calls {
		if c := &f.t.Calls[i]; c.End == end && c.Do == do && c.Class == OK {
			return c.Return
		}
	}
	return never
}

// gone returns when an end may have found that the other end was silent, and have closed the
// connection. The calls that report it return a little later.
func (f *facts) gone(end int) time.Duration {
	when := never
	for i := range f.t.Calls {
		if c := &f.t.Calls[i]; c.End == end && c.Class == TimedOut {
			when = min(when, max(c.Start, c.Return-f.slack()))
		}
	}
	return when
}

// silent reports whether a call may report that the peer is silent, where its process has to
// answer. The link carried nothing for as long as the end waits for an answer. Or no goroutine
// that could answer got a processor.
func (f *facts) silent(c *Call) bool {
	s := f.p.end(c.End).Setup
	if s.KeepAlive <= 0 || f.t.Answered {
		return false
	}
	if 3*f.t.Noise >= s.KeepAlive {
		return true
	}
	long := func(at, length time.Duration) bool {
		return at+min(length, s.KeepAlive, 20*time.Second) <= c.Return && length >= s.KeepAlive*3/4
	}
	for _, e := range f.t.Suspended {
		if long(e.At, e.For) {
			return true
		}
	}
	for _, e := range f.t.Link {
		length := e.For
		if e.Do == Freeze {
			length = never - e.When
		}
		if e.Do != Reset && long(e.When, length) {
			return true
		}
	}
	return false
}

// setters returns the calls that may have set the deadline of c between then and the return
// of c. A call is left out if a later one began after its end, and had returned by then. If
// calls overlap in time, any of them may have been the last.
func (f *facts) setters(c *Call, then time.Duration) (ds []*Call) {
	for i := range f.t.Calls {
		d := &f.t.Calls[i]
		if d.End == c.End && d.Class == OK && sets(d, c) && d.Start <= c.Return {
			ds = append(ds, d)
		}
	}
	all := slices.Clone(ds)
	return slices.DeleteFunc(ds, func(d *Call) bool {
		return slices.ContainsFunc(all, func(e *Call) bool { return e != d && e.Start >= d.Return && e.Return <= then })
	})
}

// deadline returns the deadline that a setter sets, or never.
func (c *Call) deadline() time.Duration {
	if c.Do == ClearRead || c.Do == ClearWrite {
		return never
	}
	return c.Due
}

// due returns the earliest deadline that may have held for a call at any time between its
// start and its return, or never if there was none.
func (f *facts) due(c *Call) time.Duration {
	earliest := never
	for _, d := range f.setters(c, c.Start) {
		earliest = min(earliest, d.deadline())
	}
	return earliest
}

// sets reports whether a call sets the deadline of another one.
func sets(d, c *Call) bool {
	switch d.Do {
	case SetBoth:
		return c.Do.reads() || c.Do.writes()
	case SetRead, ClearRead:
		return c.Do.reads()
	case SetWrite, ClearWrite:
		return c.Do.writes()
	}
	return false
}

// overdue returns when a call should have returned because of its deadline: the moment at
// which the last deadline passed, or never.
func (f *facts) overdue(c *Call) time.Duration {
	ds := f.setters(c, c.Return)
	if len(ds) == 0 {
		return never
	}
	var at, set time.Duration
	for _, d := range ds {
		at, set = max(at, d.deadline()), max(set, d.Return)
	}
	if at == never {
		return never
	}
	return max(at, set, c.Start)
}

// slack is the time that the machine may add to every bound.
func (f *facts) slack() time.Duration {
	s := 50*time.Millisecond + 3*f.t.Noise
	if f.t.Slow {
		s += 2 * time.Second
	}
	return s
}

// mayBeTooLong returns the length of the shortest message that a program's limits may
// refuse.
const mayBeTooLong = 128 << 10

// overrun returns how much later than a deadline, or Close, a call may return on the
// program's link.
func (f *facts) overrun() time.Duration {
	bound := deadlineBound
	if r := f.p.Link.Rate; r > 0 && r < bulkRate {
		bound = bound * bulkRate / time.Duration(r)
	}
	return bound + 4*f.p.Link.Delay
}

// took returns how long the call took from a moment on, but for the time for which its process was
// stopped.
func (f *facts) took(c *Call, from time.Duration) time.Duration {
	d := c.Return - from
	if c.End == 1 {
		d -= f.suspended(from, c.Return)
	}
	return d
}

// suspended returns for how long the second end's process was stopped between two moments.
func (f *facts) suspended(from, to time.Duration) (sum time.Duration) {
	for _, s := range f.t.Suspended {
		sum += s.within(from, to)
	}
	return sum
}

// atOnce checks that a call did not wait for the peer.
func (f *facts) atOnce(c *Call, slack time.Duration, found report) {
	if took := f.took(c, c.Start); took > closeBound+slack && !f.allowed(maySlow, c) {
		found(true, fmt.Sprintf("%v returns within %v", c.Do, closeBound), "%v, which is %.0f ms", c, ms(took))
	}
}

// judgeTime checks how long a call took.
func (f *facts) judgeTime(c *Call, found report) {
	if c.Class == Ended {
		return // The process may take its time to end.
	}
	slack, bound := f.slack(), f.overrun()
	switch c.Do {
	case Close, CloseRead, SetRead, SetWrite, SetBoth, ClearRead, ClearWrite:
		f.atOnce(c, slack, found)
		return
	case CloseWrite:
		if c.Lane == Writing { // Otherwise it waits for messages that are sent at the same time.
			f.atOnce(c, slack, found)
		}
	}
	if !c.Do.reads() && !c.Do.writes() && c.Do != CloseWrite {
		return
	}
	if d := f.overdue(c); d != never && f.took(c, d) > bound+slack && !f.allowed(maySlow, c) {
		found(true, fmt.Sprintf("a deadline is overrun by %v at most", deadlineBound), "%v, which is %.0f ms behind it", c, ms(c.Return-d))
	}
	if d := f.ends[c.End].closed; d != never && f.took(c, max(d, c.Start)) > bound+slack && !f.allowed(maySlow, c) {
		found(true, fmt.Sprintf("calls return within %v of Close", deadlineBound), "%v, which is %.0f ms behind Close", c, ms(c.Return-max(d, c.Start)))
	}
	s := f.p.end(c.End).Setup
	if s.KeepAlive > 0 && !f.t.Answered && f.freeze != never {
		since := max(c.Start, f.freeze)
		noticed := since + s.silence() + deadlineBound + slack
		// Keep-alive ends with a Close that came first. Then the bound of Close holds.
		if took := c.Return - since; c.Return > noticed && f.ends[c.End].closed > noticed {
			found(true, fmt.Sprintf("a silent peer is noticed within %v", s.silence()), "%v, which is %.0f ms after the link was cut", c, ms(took))
		}
	}
}

// Compare checks what can only be seen in comparison with the other network: how long a
// program took.
func Compare(p *Program, tcp, rdma *Trace) []Violation {
	if tcp.Failed != "" || rdma.Failed != "" || tcp.GaveUp > 0 || rdma.GaveUp > 0 || p.Link.frozen() || p.Link.cut() {
		return nil
	}
	allowance := 2*time.Second + 10*rdma.Noise
	a, b := p.First.Setup, p.Other.Setup
	allowance += time.Duration(p.bytes()/min(a.segment(), b.segment())) * time.Millisecond // Each segment may wake both ends.
	// TCP drops bytes at Close that rdmanet delivers: half a window for each time that the
	// link takes both ways.
	rounds := time.Duration(2 * p.bytes() / min(a.window(), b.window()))
	allowance += rounds * 2 * p.Link.Delay
	if r := p.Link.Rate; r > 0 {
		allowance += time.Duration(p.bytes()) * time.Second / time.Duration(r)
	}
	if rdma.Slow {
		allowance += 30 * time.Second
	}
	if limit := 2*tcp.Duration + allowance; rdma.Duration > limit {
		return []Violation{{"a program takes no longer than over TCP, but for an allowance",
			fmt.Sprintf("%.0f ms, over TCP %.0f ms", ms(rdma.Duration), ms(tcp.Duration)), true}}
	}
	return nil
}
