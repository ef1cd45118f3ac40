package rdmanet

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/rdmanet/rdmanet/internal/errno"
)

// MsgFlags say how a message is sent, and of a received one how it was. They can be
// combined.
type MsgFlags uint8

func (f MsgFlags) kind() int {
	if f&Expedited != 0 {
		return expedited
	}
	return normal
}

// sendOptions is how something is sent.
type sendOptions struct {
	message bool // as one message, not as a stretch of the stream
	flags   MsgFlags
	token   uint32 // taken back at the peer by the first segment, if not 0
}

// wire is what the segments say of it.
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
	// Expedited sends a message ahead of all normal ones, and of all that Write and
	// ReadFrom have, that this side has not handed to the device yet; behind
	// expedited ones, and never in the middle of another message. So it waits
	// for the rest of a message that has begun, also for the last piece of one sent
	// with Partial.
	//
	// The receiver can tell such a message. One that does not know the flag (see
	// Extensions.MessageFlags) gets it as any other, and still early.
	Expedited MsgFlags = 1 << iota

	// Partial sends a piece of a message. More follows with the next sends of the
	// same kind, expedited or normal, whoever makes them; the first one without
	// Partial ends the message, and may be empty. Write is such a one. Until then
	// sends of the other kind wait. A message may have any number of pieces.
	// An empty piece is nothing, unless it is the last one.
	//
	// Received, it says that more of the message is to come.
	Partial

	// NoResponse is a hint: no answer is expected to this message, so the peer need
	// not hurry to make room for others. It does so when it must, or when it
	// sends something itself. Without it the peer takes some care that the sender
	// does not have to wait. A receiver does not see it.
	NoResponse

	// NonBlocking sends what can be handed to the device at once. Where that is
	// nothing the error is syscall.EAGAIN, and SendPossible tells when to try again.
	NonBlocking

	allMsgFlags = Expedited | Partial | NoResponse | NonBlocking
)

var (
	errPieces      = fmt.Errorf("pieces of a message: the peer does not know them: %w", errors.ErrUnsupported)
	errFlags       = fmt.Errorf("unknown flags: %w", syscall.EINVAL)
	errQueuedFlags = fmt.Errorf("a queued send has nothing to block: %w", syscall.EINVAL)
	errTooLongNow  = fmt.Errorf("longer than can be sent without blocking: %w", errno.EMSGSIZE)
	errMessageOpen = fmt.Errorf("the last piece of a message has not been sent: %w", syscall.EINVAL)
)
