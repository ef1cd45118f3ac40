package rdmanet

import (
	"errors"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// This file has what is different where both devices hold a Send until there is a receive for
// it (ibv.CapHoldSends). The software device does on Linux, as TCP's window holds back what the
// peer has no room for. Such a connection gives a program what TCP gives it:
//
//   - There are no credits. What is written goes until the kernels of both hosts have no more
//     room. Nothing is sent to a process but what its peer's program writes. A grant would
//     reach the socket of a process that has ended, and Linux drops what such a socket has not
//     sent yet when something arrives.
//   - A call that sends returns when the kernel has its data, from where it lies
//     (ibv.InPlaceQP), so that nothing is lost when the process ends. Writes are not joined.
//   - A process that ends, in whatever way, is the end of its stream. An end in the middle of a
//     message is told by FIN.
//
// These messages are still copied, and handed over later if the kernel has no room: those of
// the connection itself, and up to batchBudget bytes of a call that does not block, or that is
// cut short by its deadline, by CloseWrite or by Close.

// goWithoutCredits prepares a new connection between devices that hold Sends. There are no
// large transfers: what the devices say to each other about one would wait behind a Send that
// waits for a receive. Longer messages than others go in segments.
func (c *conn) goWithoutCredits() {
	c.lane.inPlace, _ = c.lane.qp.(ibv.InPlaceQP)
	c.in.reasm.cuts = true
	if c.tx.mode != TransferNone {
		c.agreed.maxFragmentedSend, c.in.reasm.max = sizeCeiling, sizeCeiling
	}
	c.tx.mode, c.rx.mode = TransferNone, TransferNone
}

// handOver waits until the device has handed over what the call has posted in place, or until
// the call has to end. Then the device copies what is left. An error says why it was not sent.
func (c *conn) handOver(m *sendOptions) error {
	q := c.lane.inPlace
	for m.flags&NonBlocking == 0 {
		var done bool
		var err error
		c.send.handingOver = true
		c.unlocked(func() { done, err = q.Flush() })
		c.send.handingOver = false
		switch {
		case err != nil:
			return c.sendFailed(err)
		case done:
			return nil
		case c.sendErr(m.call()) != nil:
			q.Keep()
			return nil
		}
	}
	q.Keep()
	return nil
}

// sendFailed notes that nothing can be sent any more because of err, and returns the error of
// calls that send. What the peer has sent can still be read.
func (c *conn) sendFailed(err error) error {
	if !c.life.over() {
		if errors.Is(err, errno.EPIPE) {
			c.send.failed = errPeerClosed
		} else {
			c.send.failed = broken(err)
		}
		c.wakeAll()
	}
	return c.sendErr(closeCall)
}
