package twin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// Class is the kind of an error, as a program sees it by errors.Is.
type Class string

// These are the classes of errors.
const (
	OK          Class = ""
	EOF         Class = "EOF"
	Deadline    Class = "deadline exceeded"
	Closed      Class = "closed"
	ResetByPeer Class = "reset"
	Pipe        Class = "broken pipe"
	TimedOut    Class = "timed out"
	Again       Class = "would block"
	Short       Class = "short buffer"
	TooLong     Class = "too long"
	Unsupported Class = "unsupported"
	NotConn     Class = "not connected"
	Broken      Class = "unexpected EOF"
	BadAddress  Class = "bad address"
	Ended       Class = "the process ended"
	Other       Class = "other"
)

// classify returns the class of an error.
func classify(err error) Class {
	switch {
	case err == nil:
		return OK
	case err == io.EOF:
		return EOF
	case errors.Is(err, os.ErrDeadlineExceeded):
		return Deadline
	case errors.Is(err, net.ErrClosed):
		return Closed
	case errors.Is(err, syscall.ETIMEDOUT):
		return TimedOut
	case errors.Is(err, errno.EPIPE):
		return Pipe
	case errors.Is(err, errno.ECONNRESET):
		return ResetByPeer
	case errors.Is(err, errno.EFAULT):
		return BadAddress
	case errors.Is(err, io.ErrUnexpectedEOF):
		return Broken
	case errors.Is(err, errno.EAGAIN):
		return Again
	case errors.Is(err, io.ErrShortBuffer):
		return Short
	case errors.Is(err, rdmanet.ErrMessageTooLong):
		return TooLong
	case errors.Is(err, errors.ErrUnsupported):
		return Unsupported
	case errors.Is(err, errno.ENOTCONN):
		return NotConn
	}
	return Other
}

// shape returns what is wrong with an error's type, which callers check too.
func shape(err error, class Class) string {
	if class == OK || class == EOF {
		return ""
	}
	var op *net.OpError
	if !errors.As(err, &op) {
		return fmt.Sprintf("is a %T, not a *net.OpError", err)
	}
	if timeout := class == Deadline || class == TimedOut || class == Again; op.Timeout() != timeout {
		return fmt.Sprintf("Timeout is %v", op.Timeout())
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return "matches context.DeadlineExceeded"
	}
	return ""
}

// A Lane is one of the goroutines of an end.
type Lane uint8

// These are the lanes of an end. The last one closes the end when the others are done, or
// hang.
const (
	Writing Lane = iota
	Reading
	Control
	Closing
)

var laneNames = [...]string{"writing", "reading", "control", "closing"}

// String returns the name in lower case.
func (l Lane) String() string { return laneNames[l] }

// A Call is one call of a method of the connection. Times count from the set-up of the
// connection.
type Call struct {
	End    int
	Lane   Lane
	Do     Kind
	Start  time.Duration
	Return time.Duration
	Asked  int64         // Asked is how many bytes are to be written, or the room of a read.
	Bad    int64         // Bad is how many of those bytes cannot be accessed.
	N      int64         // N is how many bytes the call has returned.
	More   int64         // More is how many more bytes it may have taken, if it does not report them.
	Each   int64         // Each is the length of one write, if the call stands for many.
	Piece  bool          // Piece is set if it did not end the message.
	Due    time.Duration // Due is the deadline that it has set.
	Class  Class
	Err    string // Err is the text of the error.
	Shape  string // Shape is what was wrong with the error's type.
	Wrong  string // Wrong is what was wrong with the bytes.
}

// String describes the call in a line.
func (c Call) String() string {
	s := fmt.Sprintf("%7.1f to %7.1f ms  end %d %-7v %v", ms(c.Start), ms(c.Return), c.End, c.Lane, c.Do)
	switch {
	case c.Do == SetRead || c.Do == SetWrite || c.Do == SetBoth:
		s += fmt.Sprintf(" due at %.1f ms", ms(c.Due))
	case c.Do.writes() || c.Do.reads():
		s += fmt.Sprintf(" %d of %d", c.N, c.Asked)
		if c.Piece {
			s += " (piece)"
		}
	}
	if c.Bad > 0 {
		s += fmt.Sprintf(", of which %d cannot be accessed", c.Bad)
	}
	if c.Err != "" {
		s += ": " + c.Err
	}
	for _, wrong := range []string{c.Wrong, c.Shape} {
		if wrong != "" {
			s += " !! " + wrong
		}
	}
	return s
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// A Trace is what happened when a program ran.
type Trace struct {
	Network string // Network is "tcp" or "rdma".
	Calls   []Call // Calls has the calls in the order in which they returned.
	Link    []Event

	Suspended []Span // Suspended has the times for which the second end's process was stopped.

	Duration time.Duration // Duration is the time of the run, or of the set-up if that failed.
	Noise    time.Duration // Noise is how late this process's goroutines ran.
	Slow     bool          // Slow is set if the device is emulated.
	Answered bool          // Answered is set if each end's kernel answers keep-alive, whatever the link carries.
	GaveUp   time.Duration // GaveUp is when nothing had moved for too long, zero for never.
	Hang     string        // Hang has the calls that had not returned long after Close, and all stacks.
	Died     string        // Died is how the second end's process ended, if that was its own fault.
	Failed   string        // Failed is the reason why the connection could not be made.
	Held     bool          // Held is set if the kernel has what Write has taken.
}

// recorder collects the calls of a run.
type recorder struct {
	start  time.Time
	server *server // server is set in the process that runs one end for another one.
	mu     sync.Mutex
	calls  []Call
}

func (r *recorder) now() time.Duration { return time.Since(r.start) }

func (r *recorder) add(c Call, err error) Class {
	c.Return = r.now()
	c.Class = classify(err)
	if err != nil {
		c.Err = err.Error()
		c.Shape = shape(err, c.Class)
	}
	r.put(c)
	return c.Class
}

// put records a call as it is.
func (r *recorder) put(c Call) {
	if r.server != nil {
		r.server.tell(notice{Call: &c})
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = append(r.calls, c)
}
