package smbdpeer

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// pair returns two peers that are connected.
func pair(t *testing.T) (dialled, accepted *Peer) {
	t.Helper()
	leaktest.Check(t)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	ln, err := Listen(ctx, iwarp.New(iwarp.Config{}), netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	done := make(chan error, 1)
	go func() {
		var err error
		accepted, err = ln.Accept(ctx)
		done <- err
	}()
	dialled, err = Dial(ctx, iwarp.New(iwarp.Config{}), ln.Addr())
	if err := errors.Join(err, <-done); err != nil {
		t.Fatal(err)
	}
	return dialled, accepted
}

// Both ends write more than there are credits for before either reads.
func TestBothWays(t *testing.T) {
	a, b := pair(t)
	data := bytes.Repeat([]byte("smb direct "), 200_000)
	for _, p := range []*Peer{a, b} {
		if n, err := p.Write(data); n != len(data) || err != nil {
			t.Fatal(n, err)
		}
	}
	for _, p := range []*Peer{a, b} {
		if err := defect.ReadFull(p, data); err != nil {
			t.Fatal(err)
		}
	}
	a.SetReadDeadline(time.Now())
	if _, err := a.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read with a deadline in the past: %v", err)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if _, err := b.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("read after the other end has closed: %v", err)
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
}

// A malformed message ends the connection, with an error.
func TestMalformed(t *testing.T) {
	a, b := pair(t)
	good := DataTransfer{CreditsRequested: 1, CreditsGranted: 1, DataOffset: 24, DataLength: 4}.Append(nil)
	bad := DataTransfer{CreditsRequested: 0, DataOffset: 24, DataLength: 4}.Append(nil)
	if err := a.Post(append(good, "good"...), append(bad, "bad!"...)); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(struct{ io.Reader }{b})
	if string(got) != "good" || err == nil {
		t.Errorf("%q and %v came", got, err)
	}
	a.Close()
	b.Close()
}

// lateCQ has a message for who polls it, and nothing else.
type lateCQ struct {
	ibv.CQ
	polls int
}

func (q *lateCQ) Arm(bool) error { return nil }
func (q *lateCQ) Interrupt()     {}
func (q *lateCQ) Wait(time.Time) error {
	time.Sleep(time.Millisecond)
	return ibv.ErrInterrupted
}

func (q *lateCQ) Poll(wcs []ibv.WC) (int, error) {
	if q.polls++; q.polls > 1 {
		return 0, nil
	}
	time.Sleep(20 * time.Millisecond)
	wcs[0] = ibv.WC{Op: ibv.WCRecv, ByteLen: PayloadOffset + 3}
	return 1, nil
}

type sink struct{ ibv.QP }

func (sink) PostRecv([]ibv.RecvWR) (int, error) { return 1, nil }

type key struct{ ibv.MR }

func (key) LKey() uint32 { return 0 }

// The end of the connection may be told before somebody has polled what came in front of it.
func TestEndBehindData(t *testing.T) {
	p := &Peer{cq: &lateCQ{}, qp: sink{}, recvMR: key{}, recvs: make([]byte, receiveSize), started: true, done: make(chan struct{})}
	p.changed.L = &p.mu
	h := DataTransfer{CreditsGranted: 1, CreditsRequested: 1, DataOffset: PayloadOffset, DataLength: 3}
	copy(p.recvs, h.Append(nil))
	copy(p.recvs[PayloadOffset:], "end")
	p.disconnected(nil)
	p.serveBehind()
	b := make([]byte, 10)
	if n, err := p.Read(b); string(b[:n]) != "end" || err != nil {
		t.Errorf("read %q, %v", b[:n], err)
	}
	if n, err := p.Read(b); n != 0 || err != io.EOF {
		t.Errorf("read %q, %v behind it", b[:n], err)
	}
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	<-p.done
}
