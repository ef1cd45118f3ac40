package smbdpeer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
)

const (
	receives    = 64   // receives is the number of receive buffers.
	sends       = 32   // sends is the number of send buffers.
	receiveSize = 8192 // receiveSize is the length of each buffer in bytes.
	minSendSize = 128
	fragmented  = 1 << 20 // fragmented is MaxFragmentedSize.

	// closeTime bounds how long Close waits until the other end has taken what was sent,
	// and has closed.
	closeTime = 5 * time.Second
)

// A Peer is one end of a connection.
type Peer struct {
	id     ibv.ID
	pd     ibv.PD
	cq     ibv.CQ
	qp     ibv.QP
	recvMR ibv.MR
	sendMR ibv.MR
	recvs  []byte
	sendsB []byte
	done   chan struct{} // done is closed when serve has returned.

	sending sync.Mutex // sending is held for the whole of a message.

	mu      sync.Mutex
	changed sync.Cond
	maxSend int
	started bool // started is set after the negotiation. All that arrives then is Data Transfer messages.
	first   []byte
	data    []byte // data is for Read.
	credits int    // credits is how many sends the other end has receives for.
	owed    int    // owed is how many posted receives were not granted yet.
	free    []int  // free has the free send buffers.
	asked   bool   // asked is set while the other end waits for an answer.
	over    bool   // over is set when the device has reported the end of the connection.
	why     error  // why is the cause that it has reported. Messages that came before may still be in cq.
	gone    bool   // gone is set when the connection is over and everything is in data.
	err     error  // err is the cause, nil for an orderly end.
	closed  bool
	due     time.Time // due is the deadline of Read.
	alarm   *time.Timer
}

func (p *Peer) receive(i int) error {
	b := p.recvs[i*receiveSize:][:receiveSize]
	_, err := p.qp.PostRecv([]ibv.RecvWR{{ID: uint64(i), SGL: []ibv.SGE{{Buf: b, LKey: p.recvMR.LKey()}}}})
	return err
}

// end notes that the connection is over.
func (p *Peer) end(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.gone {
		p.gone, p.err = true, err
	}
	p.changed.Broadcast()
}

// disconnected makes serve end the connection after it has handled what came before.
func (p *Peer) disconnected(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over || p.gone {
		return
	}
	p.over, p.why = true, err
	p.cq.Interrupt() // mu is held, because Close might have closed cq otherwise.
}

func (p *Peer) serveBehind() {
	go func() {
		defer close(p.done)
		p.serve()
	}()
}

// serve handles completions until Close.
func (p *Peer) serve() {
	var wcs [16]ibv.WC
	for {
		p.mu.Lock()
		over, why := p.over, p.why
		p.mu.Unlock()
		n, err := p.cq.Poll(wcs[:])
		if err == nil && n == 0 {
			if err = p.cq.Arm(false); err == nil {
				n, err = p.cq.Poll(wcs[:])
			}
		}
		if err != nil {
			p.end(err)
			return
		}
		for i := range wcs[:n] {
			p.completed(&wcs[i])
		}
		if n > 0 {
			p.grantIfDue()
			continue
		}
		if over {
			p.end(why)
		}
		p.mu.Lock()
		closed := p.closed && p.gone
		p.mu.Unlock()
		if closed {
			return
		}
		if err := p.cq.Wait(time.Time{}); err != nil && !errors.Is(err, ibv.ErrInterrupted) {
			p.end(err)
			return
		}
	}
}

func (p *Peer) completed(wc *ibv.WC) {
	if wc.Status != ibv.WCSuccess {
		// The event names the cause, if one comes.
		p.end(nil)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	defer p.changed.Broadcast()
	if wc.Op != ibv.WCRecv {
		p.free = append(p.free, int(wc.ID))
		return
	}
	i := int(wc.ID)
	b := p.recvs[i*receiveSize:][:wc.ByteLen]
	if !p.started {
		p.started, p.first = true, append([]byte(nil), b...)
	} else if h, payload, err := ParseDataTransfer(b); err != nil {
		p.gone, p.err = true, err
		p.qp.SetError()
		return
	} else {
		p.credits += int(h.CreditsGranted)
		p.data = append(p.data, payload...)
		p.asked = p.asked || h.Flags&FlagResponseRequested != 0
		p.owed++
	}
	if p.receive(i) != nil && !p.gone {
		p.gone = true
	}
}

// negotiation waits for the first message.
func (p *Peer) negotiation(ctx context.Context, length int) ([]byte, error) {
	stop := context.AfterFunc(ctx, func() { p.end(ctx.Err()) })
	defer stop()
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.first == nil && !p.gone {
		p.changed.Wait()
	}
	if p.first == nil || len(p.first) < length {
		return nil, fmt.Errorf("smbdpeer: no negotiation: % x, %w", p.first, errors.Join(io.ErrUnexpectedEOF, p.err))
	}
	return p.first, nil
}

// grantIfDue sends an empty message if the other end needs one.
func (p *Peer) grantIfDue() {
	p.mu.Lock()
	due := p.started && (p.owed > receives/2 || p.asked)
	p.mu.Unlock()
	if due && p.sending.TryLock() { // A message that is being sent carries the grant.
		defer p.sending.Unlock()
		p.mu.Lock()
		ready := p.credits > 0 && len(p.free) > 1 && (p.credits > 1 || p.owed > 0)
		p.mu.Unlock()
		if ready {
			p.sendLocked(nil, 0)
		}
	}
}

func (p *Peer) grant() error {
	p.sending.Lock()
	defer p.sending.Unlock()
	return p.sendLocked(nil, 0)
}

// slot waits for a send buffer, and for a credit if the message needs one.
func (p *Peer) slot(credit bool) (int, error) {
	for {
		switch {
		case p.closed:
			return 0, net.ErrClosed
		case p.gone:
			return 0, errors.Join(io.ErrClosedPipe, p.err)
		case len(p.free) > 0 && (!credit || p.credits > 1 || p.credits == 1 && p.owed > 0): // [MS-SMBD] 3.1.5.1
			i := p.free[len(p.free)-1]
			p.free = p.free[:len(p.free)-1]
			if credit {
				p.credits--
			}
			return i, nil
		}
		p.changed.Wait()
	}
}

func (p *Peer) postSlot(i, n int) error {
	b := p.sendsB[i*receiveSize:][:n]
	_, err := p.qp.PostSend([]ibv.SendWR{{ID: uint64(i), Op: ibv.OpSend, Flags: ibv.SendSignaled | ibv.SendSolicited,
		SGL: []ibv.SGE{{Buf: b, LKey: p.sendMR.LKey()}}}})
	return err
}

// post sends the bytes unchanged, without a credit.
func (p *Peer) post(b []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	i, err := p.slot(false)
	if err != nil {
		return err
	}
	return p.postSlot(i, copy(p.sendsB[i*receiveSize:][:receiveSize], b))
}

// Post sends messages unchanged, one right behind the other while there are credits. Each
// takes a credit, also the last one.
func (p *Peer) Post(msgs ...[]byte) error {
	p.sending.Lock()
	defer p.sending.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(msgs) > 0 {
		for p.credits == 0 || len(p.free) == 0 {
			if p.closed || p.gone {
				return errors.Join(io.ErrClosedPipe, p.err)
			}
			p.changed.Wait()
		}
		var wrs []ibv.SendWR
		for _, m := range msgs[:min(len(msgs), p.credits, len(p.free))] {
			i := p.free[len(p.free)-1]
			p.free = p.free[:len(p.free)-1]
			p.credits--
			b := p.sendsB[i*receiveSize:][:copy(p.sendsB[i*receiveSize:][:receiveSize], m)]
			wrs = append(wrs, ibv.SendWR{ID: uint64(i), Op: ibv.OpSend, Flags: ibv.SendSignaled | ibv.SendSolicited,
				SGL: []ibv.SGE{{Buf: b, LKey: p.sendMR.LKey()}}})
		}
		if _, err := p.qp.PostSend(wrs); err != nil {
			return err
		}
		msgs = msgs[len(wrs):]
	}
	return nil
}

// MaxPayload returns how many bytes one message carries.
func (p *Peer) MaxPayload() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.maxSend - PayloadOffset
}

// sendLocked sends one segment. The caller holds sending.
func (p *Peer) sendLocked(payload []byte, remaining int) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	i, err := p.slot(true)
	if err != nil {
		return err
	}
	h := DataTransfer{CreditsRequested: 255, CreditsGranted: uint16(p.owed), RemainingDataLength: uint32(remaining)}
	p.owed, p.asked = 0, false
	if len(payload) > 0 {
		h.DataOffset, h.DataLength = PayloadOffset, uint32(len(payload))
	}
	buf := p.sendsB[i*receiveSize:][:0:receiveSize]
	buf = append(h.Append(buf), payload...)
	return p.postSlot(i, len(buf))
}

// Write sends b in messages of at most 128 KiB. It returns when the device has them.
func (p *Peer) Write(b []byte) (n int, err error) {
	p.sending.Lock()
	defer p.sending.Unlock()
	segment := p.MaxPayload()
	for len(b) > 0 {
		message := b[:min(len(b), 128<<10)]
		b = b[len(message):]
		for len(message) > 0 {
			k := min(len(message), segment)
			if err := p.sendLocked(message[:k], len(message)-k); err != nil {
				return n, err
			}
			n += k
			message = message[k:]
		}
	}
	return n, nil
}

// Read reads what has arrived.
func (p *Peer) Read(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.data) == 0 && len(b) > 0 {
		switch {
		case p.closed:
			return 0, net.ErrClosed
		case p.gone && p.err != nil:
			return 0, p.err
		case p.gone:
			return 0, io.EOF
		case !p.due.IsZero() && !time.Now().Before(p.due):
			return 0, os.ErrDeadlineExceeded
		}
		p.changed.Wait()
	}
	n := copy(b, p.data)
	p.data = p.data[n:]
	return n, nil
}

// SetReadDeadline bounds Read. The zero time means no deadline.
func (p *Peer) SetReadDeadline(t time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.alarm != nil {
		p.alarm.Stop()
		p.alarm = nil
	}
	if p.due = t; !t.IsZero() {
		p.alarm = time.AfterFunc(time.Until(t), func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.changed.Broadcast()
		})
	}
}

// Close ends the connection when the device has what was sent.
func (p *Peer) Close() error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return net.ErrClosed
	}
	timer := time.AfterFunc(closeTime, func() { p.end(nil) })
	defer timer.Stop()
	for len(p.free) < sends && !p.gone {
		p.changed.Wait()
	}
	p.closed = true
	if p.alarm != nil {
		p.alarm.Stop()
	}
	p.changed.Broadcast()
	p.mu.Unlock()
	p.id.Disconnect()
	p.mu.Lock()
	for !p.gone {
		p.changed.Wait()
	}
	p.mu.Unlock()
	p.cq.Interrupt()
	<-p.done
	err := p.qp.Close()
	return errors.Join(err, p.cq.Close(), p.recvMR.Close(), p.sendMR.Close(), p.pd.Close(), p.id.Close())
}
