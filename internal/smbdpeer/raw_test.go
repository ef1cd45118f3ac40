package smbdpeer

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// rawPair returns a raw peer that has negotiated with a plain one.
func rawPair(t *testing.T) (*Raw, *Peer) {
	t.Helper()
	leaktest.Check(t)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	provider := iwarp.New(iwarp.Config{})
	ln, err := Listen(ctx, provider, netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	accepted := make(chan *Peer, 1)
	go func() {
		p, err := ln.Accept(ctx)
		if err != nil {
			t.Error(err)
		}
		accepted <- p
	}()
	id, err := provider.Resolve(ctx, netip.AddrPort{}, ln.Addr())
	if err != nil {
		t.Fatal(err)
	}
	raw := NewRaw(t, id, time.Minute)
	if err := id.Connect(ctx, ibv.ConnParam{ResponderResources: 1, InitiatorDepth: 1}); err != nil {
		t.Fatal(err)
	}
	resp := raw.Negotiate(NegotiateRequest{MinVersion: Version, MaxVersion: Version, CreditsRequested: 16,
		PreferredSendSize: 1024, MaxReceiveSize: 8192, MaxFragmentedSize: 1 << 20})
	if resp.Status != StatusSuccess || raw.Credits == 0 || raw.Credits != int(resp.CreditsGranted) {
		t.Fatalf("%+v and %d credits", resp, raw.Credits)
	}
	p := <-accepted
	if p == nil {
		t.FailNow()
	}
	return raw, p
}

// A raw peer sends what it is told to and counts credits both ways.
func TestRaw(t *testing.T) {
	raw, p := rawPair(t)
	before := raw.Credits
	raw.Grant(8)
	raw.Payload(100)
	if raw.Credits != before-2 {
		t.Errorf("%d credits of %d are left behind two messages", raw.Credits, before)
	}
	if err := defect.ReadFull(p, Segment(100, 0)[PayloadOffset:]); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	for {
		h, payload, ok := raw.ReceiveData()
		if !ok {
			t.Fatal("the connection has ended")
		}
		if h.DataLength > 0 {
			if string(payload) != "hello" {
				t.Errorf("%q came", payload)
			}
			break
		}
	}
	raw.RequestResponse(8)
	if _, _, ok := raw.ReceiveData(); !ok {
		t.Fatal("no response")
	}
	raw.SendTogether(Segment(10, 0), DataTransfer{}.Message(HeaderLen)) // one good one, one malformed
	raw.WaitEnd()
	b := make([]byte, 200)
	if n, err := p.Read(b); n != 10 || err != nil {
		t.Errorf("%d bytes came, %v", n, err)
	}
	if _, err := p.Read(b); err == nil {
		t.Error("a malformed message is no error")
	}
	p.Close()
}
