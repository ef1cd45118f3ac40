package rdmanet

import (
	"context"
	"errors"
	"io"

	"github.com/rdmanet/rdmanet/ibv"
)

// This file sends and receives the messages of the negotiation on the queue pair, before a
// conn handles what arrives. negotiate.go has their formats.

// sendMessage sends a negotiation message, which needs no credit.
func (s *setup) sendMessage(b []byte) error {
	wr := ibv.SendWR{ID: sendID, Op: ibv.OpSend, Flags: ibv.SendSignaled | ibv.SendSolicited, SGL: []ibv.SGE{{Buf: b}}}
	if len(b) <= s.qp.Cap().MaxInline {
		wr.Flags |= ibv.SendInline
	} else {
		var err error
		if s.send, err = s.dom.Pool(negotiateBuf).Get(); err != nil {
			return err
		}
		copy(s.send.B, b)
		wr.SGL[0] = s.send.SGE(len(b))
	}
	_, err := s.qp.PostSend([]ibv.SendWR{wr})
	return err
}

// notify receives the device's events during the negotiation.
func (s *setup) notify(e ibv.Event) {
	s.event.CompareAndSwap(nil, &e)
	s.cq.Interrupt()
}

// receiveMessage waits for the peer's negotiation message.
func (s *setup) receiveMessage(ctx context.Context) ([]byte, error) {
	for {
		wc, err := s.completion(ctx)
		if err != nil {
			return nil, err
		}
		if wc.ID&sendID == 0 {
			s.recv, s.posted = s.posted[0], s.posted[1:]
			return s.recv.B[:wc.ByteLen], nil
		}
	}
}

// completion waits for the next successful completion, or returns why there will be none.
func (s *setup) completion(ctx context.Context) (*ibv.WC, error) {
	if ctx.Done() != nil {
		stop := context.AfterFunc(ctx, s.cq.Interrupt)
		defer stop()
	}
	s.id.Notify(s.notify)
	var wcs [1]ibv.WC
	for {
		// The event is loaded before the poll, so that everything that completed before it
		// is handled.
		end := s.event.Load()
		if err := s.cq.Arm(false); err != nil {
			return nil, err
		}
		n, err := s.cq.Poll(wcs[:])
		if err != nil {
			return nil, err
		}
		wc := &wcs[0]
		switch {
		case n == 1 && wc.Status == ibv.WCSuccess:
			return wc, nil
		case n == 1 && wc.Status == ibv.WCFlushErr:
			// The event has the cause.
			continue
		case n == 1:
			op := ibv.WCRecv
			if wc.ID&sendID != 0 {
				op = ibv.WCSend
			}
			return nil, broken(&ibv.WCError{Status: wc.Status, Op: op, ID: wc.ID &^ sendID, Device: s.id.Device().Name()})
		case end != nil && end.Err == nil:
			return nil, broken(io.ErrUnexpectedEOF)
		case end != nil:
			return nil, broken(end.Err)
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if err := s.cq.Wait(s.due); err != nil && !errors.Is(err, ibv.ErrInterrupted) {
			return nil, err
		}
	}
}
