package twin

import (
	"go/parser"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

const at = time.Millisecond // times in the traces below

// call is a call of end 0, from a time to another.
func call(lane Lane, do Kind, from, to time.Duration, n, asked int64, class Class) Call {
	return Call{Lane: lane, Do: do, Start: from * at, Return: to * at, N: n, Asked: asked, Class: class}
}

// other is the same call of end 1.
func other(c Call) Call {
	c.End = 1
	return c
}

// TestOracle holds traces made by hand against the contract: good ones, and ones in each
// of which it is broken in one way.
func TestOracle(t *testing.T) {
	wrote := call(Writing, Write, 1, 2, 100, 100, OK)
	closeWrite := call(Writing, CloseWrite, 2, 3, 0, 0, OK)
	closed := call(Control, Close, 4, 5, 0, 0, OK)
	read := other(call(Reading, Read, 1, 3, 100, 200, OK))
	eof := other(call(Reading, Read, 5, 6, 0, 200, EOF))
	due := Call{End: 1, Lane: Control, Do: SetRead, Start: 1 * at, Return: 1 * at, Due: 10 * at}
	frozen := Program{Link: Link{Faults: []Fault{{Do: Freeze, At: 1}}}}
	impatient := frozen
	impatient.Other.Setup.KeepAlive = 300 * time.Millisecond
	patient := frozen
	patient.Other.Setup.TransferSize = 4 * 128 << 10
	freeze := []Event{{Fault{Do: Freeze}, 2 * at}}
	stop := []Event{{Fault{Do: Stop, For: 400 * at}, 1 * at}}
	slow := Program{Link: Link{Rate: bulkRate}}
	wroteMuch := call(Writing, Write, 1, 2, 128<<10, 128<<10, OK)
	wroteMost := call(Writing, Write, 1, 2, 512<<10, 512<<10, OK)
	narrow := slow
	narrow.First.Setup = Setup{MaxSegment: 512, MaxCredits: 4}
	narrow.Other.Setup = narrow.First.Setup
	var large Program
	large.First.Setup.TransferSize = 100
	piece := wrote
	piece.Do, piece.Piece = Pieces, true
	cut := other(call(Writing, TryMsg, 1, 2, 50, 100, Deadline))
	wrong := read
	wrong.Wrong = "wrong byte"
	bare := eof
	bare.Class, bare.Shape = Closed, "is no *net.OpError"
	dueWrite := due
	dueWrite.Do, dueWrite.Due = SetWrite, 2*at
	dueFirst := dueWrite
	dueFirst.End = 0
	gaveUp := other(call(Closing, Close, 1390, 1400, 0, 0, OK))
	const transfer = 128 << 10
	exit := call(Writing, Exit, 4, 4, 0, 0, OK)
	ended := call(Writing, Write, 3, 4, 0, 100, Ended)
	ended.More = 100
	cutShort := call(Writing, Write, 1, 3, 300<<10, 400<<10, Deadline)
	bad := call(Writing, Write, 1, 2, 50, 100, BadAddress)
	bad.Bad = 50
	bad0 := bad
	bad0.N = 0
	tooGood := bad
	tooGood.N = 60
	suspend := []Span{{1 * at, 400 * at}}
	var ahead, aheadLarge Program
	ahead.Other.Reading = []Op{{Do: AwaitWrote}}
	aheadLarge.Other.Reading = ahead.Other.Reading
	aheadLarge.First.Setup.TransferSize = transfer
	wroteLarge := call(Writing, Writes, 1, 2, 2<<20, 2<<20, OK)
	wroteLarge.Each = transfer
	wroteSmall := wroteLarge
	wroteSmall.Each = 100
	for _, tt := range []struct {
		name  string
		rule  string // the beginning of the one that is broken, empty for none
		p     Program
		t     Trace
		calls []Call
	}{
		{"all is well", "", Program{}, Trace{}, []Call{wrote, closeWrite, read, closed, eof}},
		{"other bytes", "bytes", Program{}, Trace{}, []Call{wrote, closeWrite, wrong, eof}},
		{"bare error", "errors are", Program{}, Trace{}, []Call{wrote, read, other(closed), bare}},
		{"more than was taken", "n is what", Program{}, Trace{}, []Call{call(Writing, Write, 1, 2, 50, 100, Deadline), read}},
		{"more than the peer could say", "", large, Trace{}, []Call{call(Writing, Write, 1, 2, 50, 100, Closed), call(Control, Close, 0, 5, 0, 0, OK), read}},
		{"more than the peer could say before it closed", "", large, Trace{},
			[]Call{dueFirst, call(Writing, Write, 1, 3, 50, 100, Deadline), read, other(call(Control, Close, 2, 5, 0, 0, OK))}},
		{"less than a peer that is there has said", "n is what", large, Trace{},
			[]Call{dueFirst, call(Writing, Write, 1, 3, 50, 100, Deadline), read, other(closed)}},
		{"more than the peer could say of a small one", "n is what", Program{}, Trace{},
			[]Call{call(Writing, Write, 1, 2, 50, 100, Closed), call(Control, Close, 0, 5, 0, 0, OK), read}},
		{"bytes lost before EOF", "EOF comes behind", Program{}, Trace{}, []Call{wrote, closeWrite, eof}},
		{"EOF in front of the rest", "EOF comes behind", Program{}, Trace{},
			[]Call{wrote, closeWrite, other(call(Reading, Read, 3, 4, 0, 200, EOF)), other(call(Reading, Read, 5, 6, 100, 200, OK))}},
		{"reset in front of the rest", "what was written before Close", Program{}, Trace{},
			[]Call{piece, closed, other(call(Reading, Read, 5, 6, 0, 200, ResetByPeer)), other(call(Reading, Read, 7, 8, 100, 200, OK))}},
		{"WriteTo comes to the end", "", Program{}, Trace{}, []Call{wrote, closeWrite, other(call(Reading, WriteTo, 1, 6, 100, 200, EOF))}},
		{"the end in a message that is whole", "the error has", Program{}, Trace{}, []Call{wrote, closeWrite, other(call(Reading, ReadMsg, 5, 6, 40, 100, Broken))}},
		{"the end in a message that was cut, before its bytes", "the error has", Program{}, Trace{},
			[]Call{piece, closed, other(call(Reading, ReadMsg, 5, 6, 40, 100, Broken))}},
		{"the end in a message that was cut", "", Program{}, Trace{}, []Call{piece, closed, other(call(Reading, ReadMsg, 5, 6, 100, 200, Broken))}},
		{"the end in a message, after CloseRead", "", Program{}, Trace{},
			[]Call{wrote, other(call(Control, CloseRead, 2, 3, 0, 0, OK)), other(call(Reading, ReadMsg, 1, 4, 40, 100, Broken))}},
		{"a message that is too long", "", Program{}, Trace{}, []Call{call(Writing, WriteMsg, 1, 2, 0, 2*transfer, TooLong)}},
		{"a Write that is too long", "the error has", Program{}, Trace{}, []Call{call(Writing, Write, 1, 2, 0, 2*transfer, TooLong)}},
		{"a write behind a message that was cut", "", Program{}, Trace{},
			[]Call{dueWrite, cut, other(call(Writing, Write, 3, 4, 0, 100, Other)), other(call(Writing, CloseWrite, 5, 6, 0, 0, Other))}},
		{"a read behind a message that was cut", "the error has", Program{}, Trace{}, []Call{dueWrite, cut, other(call(Reading, Read, 3, 4, 0, 100, Other))}},
		{"a deadline behind a message that was cut", "the error has", Program{}, Trace{}, []Call{dueWrite, cut, other(call(Control, SetRead, 3, 4, 0, 0, Other))}},
		{"EOF out of the blue", "the stream ends when", Program{}, Trace{}, []Call{wrote, read, eof}},
		{"EOF of a call that writes", "only readers", Program{}, Trace{}, []Call{call(Writing, Write, 1, 2, 0, 100, EOF)}},
		{"reset in place of bytes", "what was written before Close", Program{}, Trace{},
			[]Call{wrote, closed, other(call(Reading, Read, 5, 6, 0, 200, ResetByPeer))}},
		{"reset in place of EOF", "what was written before Close", Program{}, Trace{},
			[]Call{wrote, closed, read, other(call(Reading, Read, 5, 6, 0, 200, ResetByPeer))}},
		{"reset behind a message without an end", "", Program{}, Trace{},
			[]Call{piece, closed, read, other(call(Reading, Read, 5, 6, 0, 200, ResetByPeer))}},
		{"reset by a peer that could not be answered", "", Program{}, Trace{Noise: 400 * at},
			[]Call{call(Writing, Write, 1, 1100, 0, transfer, Closed), closed, other(call(Reading, Read, 5, 1200, 0, 200, ResetByPeer))}},
		{"reset by a peer that could have been answered", "what was written before Close", Program{}, Trace{Noise: 100 * at},
			[]Call{call(Writing, Write, 1, 1100, 0, transfer, Closed), closed, other(call(Reading, Read, 5, 1200, 0, 200, ResetByPeer))}},
		{"the linger time is over", "", Program{}, Trace{},
			[]Call{wrote, closed, other(call(Reading, Read, 5, 5100, 0, 200, ResetByPeer))}},
		{"over TCP it has no limit", "what was written before Close", Program{}, Trace{Network: "tcp"},
			[]Call{wrote, closed, other(call(Reading, Read, 5, 5100, 0, 200, ResetByPeer))}},
		{"TCP loses what meets unread bytes", "", Program{}, Trace{Network: "tcp"},
			[]Call{wrote, other(wrote), closed, other(call(Reading, Read, 5, 6, 0, 200, ResetByPeer))}},
		{"reset behind a broken pipe in place of bytes", "what was written before Close", Program{}, Trace{},
			[]Call{wrote, closed, other(call(Writing, Write, 5, 6, 0, 100, Pipe)), other(call(Reading, Read, 7, 8, 0, 200, ResetByPeer))}},
		{"TCP resets who writes to a closed end", "", Program{}, Trace{Network: "tcp"},
			[]Call{wrote, closed, other(call(Writing, Write, 5, 6, 0, 100, Pipe)), other(call(Reading, Read, 7, 8, 0, 200, ResetByPeer))}},
		{"an end that has found the peer silent", "", impatient, Trace{Link: freeze},
			[]Call{wrote, other(call(Writing, Write, 5, 600, 0, 100, TimedOut)), other(call(Reading, Read, 601, 602, 0, 200, ResetByPeer))}},
		{"a reset stays", "", Program{}, Trace{}, []Call{piece, closed, read, other(call(Reading, Read, 5, 6, 0, 200, ResetByPeer)),
			other(call(Writing, Write, 7, 8, 0, 100, ResetByPeer)), other(call(Reading, Read, 9, 10, 0, 200, ResetByPeer))}},
		{"reset by nobody", "the error has a cause", Program{}, Trace{}, []Call{call(Writing, Write, 1, 2, 0, 100, ResetByPeer)}},
		{"reset by the link", "", Program{}, Trace{Link: []Event{{Fault{Do: Reset}, 1 * at}}}, []Call{call(Writing, Write, 1, 2, 0, 100, ResetByPeer)}},
		{"TCP tells of a reset once, also to a write after CloseWrite", "", Program{}, Trace{Network: "tcp", Link: []Event{{Fault{Do: Reset}, 4 * at}}},
			[]Call{wrote, other(closeWrite), other(call(Writing, Write, 5, 5, 0, 100, ResetByPeer)), eof}},
		{"a broken pipe after CloseWrite tells of no reset", "the stream ends when", Program{}, Trace{Network: "tcp"},
			[]Call{wrote, read, other(closeWrite), other(call(Writing, Write, 5, 5, 0, 100, Pipe)), eof}},
		{"closed without Close", "the error has a cause", Program{}, Trace{}, []Call{call(Reading, Read, 1, 2, 0, 100, Closed)}},
		{"broken pipe after CloseWrite", "", Program{}, Trace{}, []Call{closeWrite, call(Writing, Write, 4, 4, 0, 100, Pipe)}},
		{"a write after CloseWrite", "a write after CloseWrite", Program{}, Trace{}, []Call{closeWrite, call(Writing, Write, 4, 4, 100, 100, OK)}},
		{"a write after Close", "a call after Close", Program{}, Trace{}, []Call{closed, call(Writing, Write, 6, 6, 100, 100, OK)}},
		{"a read after Close", "a call after Close", Program{}, Trace{}, []Call{other(wrote), closed, call(Reading, Read, 6, 6, 100, 100, OK)}},
		{"the end of the stream after Close", "a call after Close", Program{}, Trace{},
			[]Call{other(closeWrite), closed, call(Reading, Read, 6, 6, 0, 100, EOF)}},
		{"an empty read after Close", "a call after Close", Program{}, Trace{}, []Call{closed, call(Reading, Read, 6, 6, 0, 0, OK)}},
		{"an empty write after Close", "a call after Close", Program{}, Trace{}, []Call{closed, call(Writing, Write, 6, 6, 0, 0, OK)}},
		{"nothing to write after Close", "", Program{}, Trace{}, []Call{closed, call(Writing, ReadFrom, 6, 6, 0, 0, OK), call(Writing, Buffers, 6, 6, 0, 0, OK)}},
		{"a deadline that is set after Close", "a call after Close", Program{}, Trace{}, []Call{closed, call(Control, SetRead, 6, 6, 0, 0, OK)}},
		{"a deadline that is cleared after Close", "a call after Close", Program{}, Trace{}, []Call{closed, call(Control, ClearWrite, 6, 6, 0, 0, OK)}},
		{"CloseWrite after Close", "a call after Close", Program{}, Trace{}, []Call{closed, call(Writing, CloseWrite, 6, 6, 0, 0, OK)}},
		{"CloseRead after Close", "a call after Close", Program{}, Trace{}, []Call{closed, call(Control, CloseRead, 6, 6, 0, 0, OK)}},
		{"Close after Close", "a call after Close", Program{}, Trace{}, []Call{closed, call(Closing, Close, 6, 6, 0, 0, OK)}},
		{"another error after Close", "a call after Close", Program{}, Trace{}, []Call{closed, other(closed), call(Writing, Write, 6, 6, 0, 100, Pipe)}},
		{"calls after Close", "", Program{}, Trace{}, []Call{closed, call(Writing, Write, 6, 6, 0, 100, Closed), call(Reading, Read, 6, 6, 0, 100, Closed),
			call(Control, SetBoth, 6, 6, 0, 0, Closed), call(Writing, CloseWrite, 6, 6, 0, 0, Closed), call(Control, Close, 6, 6, 0, 0, Closed)}},
		{"calls beside Close", "", Program{}, Trace{}, []Call{other(wrote), call(Control, SetBoth, 5, 6, 0, 0, OK), call(Reading, Read, 5, 6, 100, 100, OK),
			call(Writing, CloseWrite, 5, 6, 0, 0, OK), closed, call(Control, Close, 5, 5, 0, 0, Closed)}},
		{"a short write without an error", "a write without an error", Program{}, Trace{}, []Call{call(Writing, Write, 1, 2, 99, 100, OK)}},
		{"an empty read", "a read without an error", Program{}, Trace{}, []Call{call(Reading, Read, 1, 2, 0, 100, OK)}},
		{"n out of range", "n", Program{}, Trace{}, []Call{call(Reading, Read, 1, 2, -1, 100, OK)}},
		{"a deadline", "", Program{}, Trace{}, []Call{due, other(call(Reading, Read, 1, 11, 0, 100, Deadline))}},
		{"a deadline that comes early", "the error has a cause", Program{}, Trace{}, []Call{due, other(call(Reading, Read, 1, 9, 0, 100, Deadline))}},
		{"of deadlines that are set at the same time any may hold", "", Program{}, Trace{},
			[]Call{{End: 1, Lane: Control, Do: SetBoth, Start: 1 * at, Return: 3 * at, Due: 1 * at}, other(call(Reading, ClearRead, 2, 4, 0, 0, OK)),
				other(call(Reading, Read, 5, 6, 0, 100, Deadline))}},
		{"a deadline that was cleared", "the error has a cause", Program{}, Trace{},
			[]Call{{End: 1, Lane: Control, Do: SetBoth, Start: 1 * at, Return: 2 * at, Due: 1 * at}, other(call(Reading, ClearRead, 2, 4, 0, 0, OK)),
				other(call(Reading, Read, 5, 6, 0, 100, Deadline))}},
		{"no deadline", "the error has a cause", Program{}, Trace{}, []Call{other(call(Reading, Read, 1, 9, 0, 100, Deadline))}},
		{"a deadline of the other direction", "the error has a cause", Program{}, Trace{}, []Call{due, other(call(Writing, Write, 1, 11, 0, 100, Deadline))}},
		{"a deadline overrun", "a deadline is overrun", Program{}, Trace{}, []Call{due, other(call(Reading, Read, 1, 320, 0, 100, Deadline))}},
		{"a deadline overrun by little", "", Program{}, Trace{}, []Call{due, other(call(Reading, Read, 1, 250, 0, 100, Deadline))}},
		{"a deadline overrun on a busy machine", "", Program{}, Trace{Noise: 50 * at}, []Call{due, other(call(Reading, Read, 1, 320, 0, 100, Deadline))}},
		{"a deadline that never fires on a silent link", "a deadline is overrun", frozen, Trace{Link: freeze, GaveUp: 1390 * at},
			[]Call{due, other(call(Reading, Read, 1, 1400, 0, 100, Closed)), gaveUp}},
		{"a small Read beside a large Write", "a deadline is overrun", frozen, Trace{Link: freeze, GaveUp: 1390 * at},
			[]Call{due, call(Writing, Write, 1, 20, transfer, transfer, OK), other(call(Reading, Read, 1, 1400, 0, 100, Closed)), gaveUp}},
		{"a large Read beside small Writes", "a deadline is overrun", frozen, Trace{Link: freeze, GaveUp: 1390 * at},
			[]Call{due, wrote, other(call(Reading, Read, 1, 1400, 0, transfer, Closed)), gaveUp}},
		{"a Read that was given a large transfer on a silent link", "", frozen, Trace{Link: freeze, GaveUp: 1390 * at},
			[]Call{due, call(Writing, Queue, 1, 2, transfer, transfer, OK), other(call(Reading, Read, 1, 2400, 0, transfer, Closed)), gaveUp}},
		{"a large Write on a silent link", "", frozen, Trace{Link: freeze, GaveUp: 1390 * at},
			[]Call{dueWrite, other(call(Writing, Write, 1, 2400, 0, transfer, Deadline)), gaveUp}},
		{"a large message on a silent link", "", patient, Trace{Link: freeze, GaveUp: 1390 * at},
			[]Call{dueWrite, other(call(Writing, WriteMsg, 1, 2400, 0, 2*transfer, Deadline)), gaveUp}},
		{"a large Write that is not given up after Close", "calls return within", frozen, Trace{Link: freeze, GaveUp: 1390 * at},
			[]Call{other(call(Writing, Write, 1, 3100, 0, transfer, Closed)), gaveUp}},
		{"a large Write that is not given up", "a deadline is overrun", frozen, Trace{Link: freeze},
			[]Call{dueWrite, other(call(Writing, Write, 1, 5700, 0, transfer, Deadline))}},
		{"a large Write on a link that stands still", "", Program{}, Trace{Link: stop},
			[]Call{dueWrite, other(call(Writing, Write, 1, 650, 0, transfer, Deadline))}},
		{"a large Write that outlasts a link that stands still", "a deadline is overrun", Program{}, Trace{Link: stop},
			[]Call{dueWrite, other(call(Writing, Write, 1, 800, 0, transfer, Deadline))}},
		{"a large Write whose answer comes behind the peer's own bytes", "", slow, Trace{},
			[]Call{dueWrite, wroteMuch, other(call(Writing, Write, 1, 525, 0, transfer, Deadline))}},
		{"a large Write whose answer comes later than the peer's own bytes", "a deadline is overrun", slow, Trace{},
			[]Call{dueWrite, wroteMuch, other(call(Writing, Write, 1, 575, 0, transfer, Deadline))}},
		{"a large Write whose answer comes later than what a small window lets the peer send", "a deadline is overrun", narrow, Trace{},
			[]Call{dueWrite, wroteMost, other(call(Writing, Write, 1, 575, 0, transfer, Deadline))}},
		{"a large Write whose answer comes behind what a wide window lets the peer send", "", slow, Trace{},
			[]Call{dueWrite, wroteMost, other(call(Writing, Write, 1, 1250, 0, transfer, Deadline))}},
		{"a large Write whose answer comes late, when the peer's own bytes had come", "a deadline is overrun", slow, Trace{},
			[]Call{dueWrite, wroteMuch, other(call(Reading, Read, 1, 2, 128<<10, 128<<10, OK)), other(call(Writing, Write, 1, 400, 0, transfer, Deadline))}},
		{"a small Write on a link that stands still", "a deadline is overrun", Program{}, Trace{Link: stop},
			[]Call{dueWrite, other(call(Writing, Write, 1, 650, 0, 100, Deadline))}},
		{"a slow Close", "Close returns", frozen, Trace{Link: freeze}, []Call{call(Control, Close, 4, 200, 0, 0, OK)}},
		{"a slow CloseWrite", "CloseWrite returns", Program{}, Trace{}, []Call{call(Writing, CloseWrite, 4, 200, 0, 0, OK)}},
		{"a CloseWrite beside a slow Write", "", Program{}, Trace{}, []Call{call(Control, CloseWrite, 4, 200, 0, 0, OK)}},
		{"a read that outlives Close", "calls return within", Program{}, Trace{}, []Call{closed, call(Reading, Read, 1, 400, 0, 100, Closed)}},
		{"a silent peer", "", impatient, Trace{Link: freeze}, []Call{other(call(Reading, Read, 1, 600, 0, 100, TimedOut))}},
		{"a silent peer that nobody notices", "a silent peer", impatient, Trace{Link: freeze, GaveUp: 2000 * at},
			[]Call{other(call(Reading, Read, 1, 2000, 0, 100, Closed)), other(call(Closing, Close, 1990, 2000, 0, 0, OK))}},
		{"a silent peer of a large Write that was closed first", "", impatient, Trace{Link: freeze},
			[]Call{other(call(Writing, Write, 1, 1400, 0, transfer, Closed)), other(call(Control, Close, 500, 501, 0, 0, OK))}},
		{"a silent peer whose kernel answers", "the error has a cause", impatient, Trace{Link: freeze, Answered: true}, []Call{other(call(Reading, Read, 1, 600, 0, 100, TimedOut))}},
		{"a silent peer whose kernel answers, on a slow machine", "the error has a cause", impatient, Trace{Link: freeze, Answered: true, Noise: 100 * at},
			[]Call{other(call(Reading, Read, 1, 600, 0, 100, TimedOut))}},
		{"nobody gives up a peer whose kernel answers", "", impatient, Trace{Link: freeze, Answered: true, GaveUp: 2000 * at},
			[]Call{other(call(Reading, Read, 1, 2000, 0, 100, Closed)), other(call(Closing, Close, 1990, 2000, 0, 0, OK))}},
		{"silence of a link that carries", "the error has a cause", impatient, Trace{}, []Call{other(call(Reading, Read, 1, 600, 0, 100, TimedOut))}},
		{"silence of a machine that runs nobody", "", impatient, Trace{Noise: 100 * at}, []Call{other(call(Reading, Read, 1, 600, 0, 100, TimedOut))}},
		{"a process ends", "", Program{}, Trace{Held: true}, []Call{wrote, exit, read, eof}},
		{"a process ends, and bytes are lost", "EOF comes behind", Program{}, Trace{Held: true}, []Call{wrote, exit, eof}},
		{"a process ends with a reset", "what was written before Close", Program{}, Trace{Held: true},
			[]Call{wrote, exit, read, other(call(Reading, Read, 5, 6, 0, 200, ResetByPeer))}},
		{"a process ends, and its peer had more for it", "", Program{}, Trace{Held: true},
			[]Call{wrote, other(wrote), exit, other(call(Reading, Read, 5, 6, 0, 200, ResetByPeer))}},
		{"a process ends, and its peer had ended its stream", "what was written before Close arrives", Program{}, Trace{Held: true},
			[]Call{wrote, other(closeWrite), exit, other(call(Reading, Read, 5, 6, 0, 200, ResetByPeer))}},
		{"a process ends, and its device with it", "", Program{}, Trace{}, []Call{wrote, exit, other(call(Reading, Read, 5, 6, 0, 200, ResetByPeer))}},
		{"a process ends, and its device loses bytes in silence", "EOF comes behind", Program{}, Trace{}, []Call{wrote, exit, eof}},
		{"a process ends behind a call that was cut short", "", Program{}, Trace{Held: true},
			[]Call{dueFirst, cutShort, exit, other(call(Reading, Read, 1, 3, 44<<10, 64<<10, OK)), eof}},
		{"a process ends behind a call that was cut short, and too much is lost", "EOF comes behind", Program{}, Trace{Held: true},
			[]Call{dueFirst, cutShort, exit, other(call(Reading, Read, 1, 3, 43<<10, 64<<10, OK)), eof}},
		{"a process ends during a call", "", Program{}, Trace{Held: true}, []Call{wrote, exit, ended, other(call(Reading, Read, 1, 5, 150, 200, OK)), eof}},
		{"a process ends during a call that had taken less", "n is what", Program{}, Trace{Held: true},
			[]Call{wrote, exit, ended, other(call(Reading, Read, 1, 5, 201, 300, OK)), eof}},
		{"a process ends during a call, behind one that was cut short", "", Program{}, Trace{Held: true},
			[]Call{dueFirst, cutShort, exit, ended, other(call(Reading, ReadMsg, 1, 5, 50<<10, 64<<10, Broken))}},
		{"a process ends during a call, and bytes of another one are lost", "EOF comes behind", Program{}, Trace{Held: true}, []Call{wrote, exit, ended, eof}},
		{"a process ends behind a call that was cut short, with a reset", "what was written before Close", Program{}, Trace{Held: true},
			[]Call{dueFirst, cutShort, exit, other(call(Reading, Read, 5, 6, 0, 200, ResetByPeer))}},
		{"a process ends before the set-up is over", "", Program{}, Trace{Held: true},
			[]Call{other(exit), call(Reading, Read, 5, 6, 0, 200, ResetByPeer)}},
		{"a process ends that has dialled", "what was written before Close", Program{Swap: true}, Trace{Held: true},
			[]Call{other(exit), call(Reading, Read, 5, 6, 0, 200, ResetByPeer)}},
		{"a process ends that has read the end of its peer's stream", "what was written before Close", Program{}, Trace{Held: true},
			[]Call{wrote, other(closeWrite), call(Reading, Read, 3, 3, 0, 200, EOF), exit, other(call(Reading, Read, 5, 6, 0, 200, ResetByPeer))}},
		{"a process ends that had no use for memory that cannot be accessed", "what was written before Close", Program{}, Trace{Held: true},
			[]Call{wrote, other(bad0), exit, other(call(Reading, Read, 5, 6, 0, 200, ResetByPeer))}},
		{"bytes lost before EOF on a busy machine, beside a large write", "EOF comes behind", Program{}, Trace{Noise: 400 * at},
			[]Call{wrote, call(Writing, Write, 1, 1100, 0, transfer, Closed), closed, other(call(Reading, Read, 5, 1200, 0, 200, EOF))}},
		{"reset by a peer that a stopped process could not answer", "", Program{}, Trace{Suspended: []Span{{2 * at, 1200 * at}}},
			[]Call{call(Writing, Write, 1, 1100, 0, transfer, Closed), closed, other(call(Reading, Read, 5, 1300, 0, 200, ResetByPeer))}},
		{"a process ends, and a message that is whole has no end", "the error has", Program{}, Trace{Held: true},
			[]Call{wrote, exit, other(call(Reading, ReadMsg, 1, 5, 100, 200, Broken))}},
		{"a call is ended by nothing", "the error has", Program{}, Trace{Held: true}, []Call{ended}},
		{"a process ends by itself", "a process ends when", Program{}, Trace{Died: "exit status 2"}, nil},
		{"memory that cannot be accessed", "", Program{}, Trace{}, []Call{bad, other(call(Reading, Read, 1, 3, 50, 200, OK))}},
		{"less was taken than can be accessed", "the error has", Program{}, Trace{}, []Call{bad0}},
		{"less was taken than can be accessed, by TCP", "", Program{}, Trace{Network: "tcp"}, []Call{bad0}},
		{"more was taken than can be accessed", "n is what", Program{}, Trace{}, []Call{tooGood}},
		{"memory that can be accessed", "the error has", Program{}, Trace{}, []Call{call(Writing, Write, 1, 2, 50, 100, BadAddress)}},
		{"a deadline of a process that is stopped", "", Program{}, Trace{Suspended: suspend}, []Call{due, other(call(Reading, Read, 1, 650, 0, 100, Deadline))}},
		{"a deadline overrun by a process that goes on", "a deadline is overrun", Program{}, Trace{Suspended: suspend},
			[]Call{due, other(call(Reading, Read, 1, 750, 0, 100, Deadline))}},
		{"a deadline beside a process that is stopped", "a deadline is overrun", Program{}, Trace{Suspended: suspend},
			[]Call{dueFirst, call(Writing, Write, 1, 650, 0, 100, Deadline)}},
		{"a process that is stopped", "", impatient, Trace{Suspended: suspend}, []Call{other(call(Reading, Read, 1, 600, 0, 100, TimedOut))}},
		{"a process that is stopped, and its kernel answers", "the error has", impatient, Trace{Suspended: suspend, Answered: true},
			[]Call{other(call(Reading, Read, 1, 600, 0, 100, TimedOut))}},
		{"nobody reads", "what is written", ahead, Trace{Held: true, GaveUp: 1000 * at}, []Call{wroteLarge}},
		{"nobody reads, over TCP", "", ahead, Trace{Network: "tcp", GaveUp: 1000 * at}, []Call{wroteLarge}},
		{"nobody reads small writes", "what is written", aheadLarge, Trace{GaveUp: 1000 * at}, []Call{wroteSmall}},
		{"nobody reads large writes", "", aheadLarge, Trace{GaveUp: 1000 * at}, []Call{wroteLarge}},
		{"nothing moves", "what is written arrives", Program{}, Trace{GaveUp: 1000 * at}, nil},
		{"nothing moves on a cut link", "", frozen, Trace{GaveUp: 1000 * at, Link: freeze}, nil},
		{"a call hangs", "calls return after Close", Program{}, Trace{Hang: "stacks"}, nil},
		{"no connection", "connection set-up", Program{}, Trace{Failed: "refused"}, nil},
		{"bytes lost before EOF of a plain peer", "EOF comes behind", Program{Peer: Plain}, Trace{}, []Call{wrote, closed, eof}},
		{"bytes lost before a reset of a plain peer", "EOF comes behind", Program{Peer: Plain}, Trace{},
			[]Call{wrote, closed, other(call(Reading, Read, 5, 6, 0, 200, ResetByPeer))}},
		{"a plain peer reads all", "", Program{Peer: Plain}, Trace{}, []Call{wrote, closed, read, eof}},
		{"a plain peer that closes first", "", Program{Peer: Plain}, Trace{},
			[]Call{wrote, other(call(Closing, Close, 3, 4, 0, 0, OK)), closed, eof}},
		{"a plain peer and the linger time is over", "", Program{Peer: Plain}, Trace{},
			[]Call{wrote, closed, other(call(Reading, Read, 5, 5100, 0, 200, EOF))}},
		{"a malformed message", "", Program{Peer: Breaking}, Trace{},
			[]Call{other(call(Writing, Malformed, 1, 2, 64, 64, OK)), call(Reading, Read, 1, 3, 64, 100, OK), call(Reading, Read, 3, 4, 0, 100, ResetByPeer)}},
		{"bytes behind a malformed message", "n is what", Program{Peer: Breaking}, Trace{},
			[]Call{other(call(Writing, Malformed, 1, 2, 64, 64, OK)), call(Reading, Read, 1, 3, 128, 200, OK), call(Reading, Read, 3, 4, 0, 100, ResetByPeer)}},
		{"bytes in front of it are lost", "the error has", Program{Peer: Breaking}, Trace{},
			[]Call{other(call(Writing, Malformed, 1, 2, 64, 64, OK)), call(Reading, Read, 3, 4, 0, 100, ResetByPeer)}},
		{"a malformed message ends the stream", "a malformed message", Program{Peer: Breaking}, Trace{},
			[]Call{other(call(Writing, Malformed, 1, 2, 64, 64, OK)), call(Reading, Read, 1, 3, 64, 100, OK), call(Reading, Read, 3, 4, 0, 100, EOF)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.t.Calls = tt.calls
			if tt.t.Network == "" {
				tt.t.Network = "rdma"
			}
			vs := Judge(&tt.p, &tt.t)
			if tt.rule == "" {
				if len(vs) > 0 {
					t.Errorf("found %v", vs)
				}
				return
			}
			if !slices.ContainsFunc(vs, func(v Violation) bool { return strings.HasPrefix(v.Rule, tt.rule) }) {
				t.Errorf("found %v, not %q", vs, tt.rule)
			}
		})
	}
}

func TestCompare(t *testing.T) {
	tcp := &Trace{Network: "tcp", Duration: time.Second}
	small := Setup{MaxSegment: 1024, MaxCredits: 8} // a window of 8 KiB
	large := Setup{MaxSegment: 8192, MaxCredits: 255}
	program := func(s Setup, link Link) *Program {
		return &Program{First: End{Setup: s, Writing: []Op{{Do: Write, Size: 2 << 20}}}, Other: End{Setup: s}, Link: link}
	}
	for _, tt := range []struct {
		name  string
		p     *Program
		limit time.Duration
	}{
		{"nothing to carry", &Program{}, 4 * time.Second},
		{"a millisecond for each segment", program(large, Link{}), 4*time.Second + 256*time.Millisecond},
		{"time on the link for each half of a window", program(small, Link{Delay: time.Millisecond}), 4*time.Second + 2048*time.Millisecond + 512*2*time.Millisecond},
		{"hardly any for large windows", program(large, Link{Delay: time.Millisecond}), 4*time.Second + 256*time.Millisecond + 2*2*time.Millisecond},
		{"the bytes once more at the link's rate", program(large, Link{Rate: 1 << 20}), 6*time.Second + 256*time.Millisecond},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for d, n := range map[time.Duration]int{tt.limit: 0, tt.limit + time.Millisecond: 1} {
				if vs := Compare(tt.p, tcp, &Trace{Network: "rdma", Duration: d}); len(vs) != n {
					t.Errorf("%v beside %v: %v", d, tcp.Duration, vs)
				}
			}
		})
	}
}

// TestExemptions checks that each exemption stands in docs/semantics.md.
func TestExemptions(t *testing.T) {
	if len(exemptions) > 20 {
		t.Errorf("%d exemptions", len(exemptions))
	}
	doc, err := os.ReadFile("../../docs/semantics.md")
	if err != nil {
		t.Fatal(err)
	}
	_, streams, _ := strings.Cut(string(doc), "\n## Streams\n")
	streams, _, _ = strings.Cut(streams, "\n## ")
	for _, e := range exemptions {
		if !strings.Contains(streams, "\n| "+e.row+" |") {
			t.Errorf("no row %q", e.row)
		}
	}
}

// TestGenerate checks that programs depend on their seed alone, that they are Go code when
// they are printed, and that there are some of each kind.
func TestGenerate(t *testing.T) {
	kinds, peers, faults, memories := make(map[Kind]int), make(map[Peer]int), make(map[FaultKind]int), make(map[Memory]int)
	suspends := 0
	for seed := range uint64(500) {
		p := Generate(seed)
		text := p.GoString()
		if again := Generate(seed).GoString(); again != text {
			t.Fatalf("seed %d makes two programs:\n%s\n%s", seed, text, again)
		}
		if _, err := parser.ParseExpr(text); err != nil {
			t.Fatalf("seed %d: %v in\n%s", seed, err, text)
		}
		for _, l := range p.lanes() {
			for _, op := range *l {
				kinds[op.Do]++
				memories[op.Memory]++
			}
		}
		for _, f := range p.Link.Faults {
			faults[f.Do]++
		}
		suspends += len(p.Suspends)
		peers[p.Peer]++
	}
	for k, name := range kindNames {
		if kinds[k] == 0 {
			t.Errorf("no %v", name)
		}
	}
	for k := Stop; k <= Reset; k++ {
		if faults[k] == 0 {
			t.Errorf("no %v", k)
		}
	}
	if suspends == 0 {
		t.Error("no process is stopped")
	}
	for k, name := range memoryNames {
		if memories[Memory(k)] == 0 {
			t.Errorf("no memory %v", name)
		}
	}
	for k, name := range peerNames {
		if peers[Peer(k)] == 0 {
			t.Errorf("no %v", name)
		}
	}
}

// TestShrink has a program shrunk to what a condition needs.
func TestShrink(t *testing.T) {
	p := Generate(1)
	p.First.Writing = append(p.First.Writing, Op{Do: Write, Size: 100_000, Memory: Own})
	got := Shrink(p, 1000, func(p *Program) bool {
		for _, op := range p.First.Writing {
			if op.Do == Write && op.Size >= 1000 {
				return true
			}
		}
		return false
	})
	total := 0
	for _, l := range got.lanes() {
		total += len(*l)
	}
	if total != 1 || got.First.Writing[0].Size > 1400 || got.First.Writing[0].Memory != Heap || !got.Link.direct() || got.First.Setup != (Setup{}) {
		t.Errorf("%#v", got)
	}
}

// TestStream checks that bytes in the wrong place are found, and where they belong.
func TestStream(t *testing.T) {
	s := newStream(7, 0)
	b := make([]byte, 200_000)
	s.fill(b, period-100_000)
	if d := s.differ(b, period-100_000); d != "" {
		t.Error(d)
	}
	if d := s.differ(b[64:], period-100_000); !strings.Contains(d, "+64 bytes away") {
		t.Errorf("moved by 64 bytes: %q", d)
	}
	b[150_000] ^= 1
	if d := s.differ(b, period-100_000); !strings.Contains(d, "wrong byte at offset 4244301") {
		t.Errorf("one bit: %q", d)
	}
}
