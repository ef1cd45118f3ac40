package rdmanet

import "github.com/rdmanet/rdmanet/ibv"

// This file has what is different where both devices hold a Send until there is a receive for
// it (ibv.CapHoldSends). The software device does on Linux, as TCP's window holds back what the
// peer has no room for. Such a connection gives a program what TCP gives it:
//
//   - There are no credits. What is written goes until the kernels of both hosts have no more
//     room. Nothing is sent to a process but what its peer's program writes. A grant would
//     reach the socket of a process that has ended, and Linux drops what such a socket has not
//     sent yet when something arrives. Where two processes share memory, that has less room than
//     kernels have, and this process copies what nobody reads (holdsPeerBack).
//   - A call that sends returns when the kernel has its data, from where it lies
//     (ibv.InPlaceQP), so that nothing is lost when the process ends. Writes are not joined.
//   - A process that ends, in whatever way, is the end of its stream, and so is CloseWrite: each
//     direction of the TCP connection ends by itself (closeSends). FIN tells of Close, and of the
//     end in the middle of a message.
//
// These messages are still copied, and handed over later if the kernel has no room: those of
// the connection itself, and up to batchBudget bytes, or one segment, of a call that does not
// block, or that is cut short by its deadline, by CloseWrite or by Close.

// goWithoutCredits prepares a new connection between devices that hold Sends. There are no
// large transfers: what the devices say to each other about one would wait behind a Send that
// waits for a receive. Longer messages than others go in segments.
func (c *conn) goWithoutCredits() {
	c.lane.inPlace, _ = c.lane.qp.(ibv.InPlaceQP)
	c.holding, _ = c.lane.qp.(ibv.HoldingQP)
	c.holding.PeerHolds()
	c.in.reasm.cuts = true
	c.in.copies.limit, c.in.copies.free = heldMemory, 0
	if c.tx.mode != TransferNone {
		c.agreed.maxFragmentedSend, c.in.reasm.max = sizeCeiling, sizeCeiling
	}
	c.tx.mode, c.rx.mode = TransferNone, TransferNone
}

// handOver waits until the device has handed over what the call has posted in place, or until
// the call has to end. Then the device copies what is left. An error says why the last requests,
// left of them, were not sent.
func (c *conn) handOver(m *sendOptions) (left int, err error) {
	q := c.lane.inPlace
	// Whatever ends the call from here on interrupts the wait (wakeAll).
	for m.flags&NonBlocking == 0 && c.sendErr(m.call()) == nil {
		c.send.handingOver = true
		c.unlocked(func() { left, err = q.Flush() })
		c.send.handingOver = false
		if err != nil {
			return left, c.whyFailed(err)
		}
		if left == 0 {
			return 0, nil
		}
	}
	if left, err = q.Keep(); err != nil {
		return left, c.whyFailed(err)
	}
	return 0, nil
}

// whyFailed returns the error of a call that cannot send because of err, the device's error.
func (c *conn) whyFailed(err error) error {
	c.poll() // The connection may have ended, which tells the reason.
	return c.sendFailed(err)
}
