package rdmanet

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/rdmanet/rdmanet/internal/errno"
)

// MsgOption says how [Conn.WriteMsg] or [Conn.QueueMsg] sends a message. There are two kinds
// of options: [MsgFlags], and those that [Invalidate] returns.
type MsgOption interface {
	msgOption()
}

// MsgFlags says how a message is sent, or how a received message was sent. Flags are
// options ([MsgOption]), given one by one or combined by the operator |.
type MsgFlags uint8

func (MsgFlags) msgOption() {}

// Invalidate returns the option that takes back a memory key of the peer's (iWARP: STag):
// the peer's device closes the key token before it delivers the message. Exactly one segment
// of the message carries the token, [MS-SMBD] 3.1.5.4. A token of 0 stands for no key. Two
// keys for one message match syscall.EINVAL. The token is dropped where the device has no
// Send with Invalidate. If the peer has no such key the connection breaks.
//
// A message with a token goes in segments, so it has at most [Info].MaxFragmentedSize bytes.
// When a call with [NonBlocking] has taken a part of the message the key has been taken back,
// and the rest must be sent without the option. An empty piece ([Partial]) is not sent, so a
// token with it matches syscall.EINVAL.
func Invalidate(token uint32) MsgOption { return invalidation(token) }

// invalidation is the option of Invalidate.
type invalidation uint32

func (invalidation) msgOption() {}

// messageOptions returns how opts have the message p sent. It reads the options by a type
// switch, because a method call through the interface would move them to the heap.
func (c *conn) messageOptions(p []byte, opts []MsgOption) (sendOptions, error) {
	m := sendOptions{message: true}
	for _, o := range opts {
		switch o := o.(type) {
		case MsgFlags:
			m.flags |= o
		case invalidation:
			if m.token != 0 && o != 0 {
				return m, errTokens
			}
			m.token |= uint32(o)
		default:
			return m, errOption
		}
	}
	switch {
	case m.flags&^allMsgFlags != 0:
		return m, errFlags
	case m.flags&Partial != 0 && !c.messages:
		return m, errPieces
	case m.flags&Partial != 0 && m.token != 0 && len(p) == 0:
		return m, errEmptyToken
	}
	return m, nil
}

func (f MsgFlags) kind() int {
	if f&Expedited != 0 {
		return expedited
	}
	return normal
}

// sendOptions says how data is sent.
type sendOptions struct {
	message bool // message is set for a message, and not for data of the stream.
	ends    bool // data of the stream that ends a message
	flags   MsgFlags
	token   uint32 // token is the key of the peer's that the first segment takes back; 0 means none.
	checked int    // how many bytes of the payload have been found readable
}

// call returns what ends a call that sends so.
func (m *sendOptions) call() callKind {
	if m.message || m.ends {
		return messageCall
	}
	return streamCall
}

// wire returns the flags that the segments carry.
func (m *sendOptions) wire() (flags uint16) {
	if m.flags&Expedited != 0 {
		flags |= flagExpedited
	}
	if m.flags&Partial != 0 {
		flags |= flagPartial
	}
	if m.flags&NoResponse != 0 {
		flags |= flagNoResponse
	}
	return flags
}

const (
	// Expedited sends a message ahead of all normal messages, and of all data of Write and
	// ReadFrom, that this side's device has not received yet. Expedited messages keep their
	// order among themselves. An expedited message never goes in the middle of another
	// message: it waits for the rest of a message that has begun, and for the last piece of
	// one that is sent with Partial.
	//
	// A receiver without Extensions.MessageFlags cannot tell that a message was expedited.
	Expedited MsgFlags = 1 << iota

	// Partial sends a piece of a message. The next sends of the same kind, expedited or
	// normal, whoever makes them, are the next pieces. The first send without Partial ends
	// the message, and may be empty. A Write is such a send. Until then sends of the other
	// kind wait. A message may have any number of pieces. An empty piece sends nothing,
	// unless it is the last one.
	//
	// With a received piece it says that more of the message is to come.
	Partial

	// NoResponse is the hint that no answer to this message is expected, so that the peer
	// need not hurry to grant credits. The peer grants them when it must, or when it sends
	// something itself. Without the hint it grants them so early that the sender does not
	// have to wait. Receivers do not see this flag.
	NoResponse

	// NonBlocking sends what the device can take at once. If that is nothing the error
	// matches syscall.EAGAIN, and Conn.Writable says when to try again.
	NonBlocking

	allMsgFlags = Expedited | Partial | NoResponse | NonBlocking
)

var (
	errPieces      = fmt.Errorf("pieces of a message: the peer does not know them: %w", errors.ErrUnsupported)
	errFlags       = fmt.Errorf("unknown flags: %w", syscall.EINVAL)
	errOption      = fmt.Errorf("nil or unknown option: %w", syscall.EINVAL)
	errTokens      = fmt.Errorf("two keys for one message to take back: %w", syscall.EINVAL)
	errEmptyToken  = fmt.Errorf("an empty piece of a message takes back no key: %w", syscall.EINVAL)
	errQueuedFlags = fmt.Errorf("a queued send has nothing to block: %w", syscall.EINVAL)
	errTooLongNow  = fmt.Errorf("longer than can be sent without blocking: %w", errno.EMSGSIZE)
	errMessageOpen = fmt.Errorf("the last piece of a message has not been sent: %w", syscall.EINVAL)
)
