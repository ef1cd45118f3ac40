// Package udpeer has a peer for tests of datagrams. It uses UD queue pairs by the verbs, as
// rdma-core's udaddy does, and shares no code with rdmanet.
package udpeer

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
)

// patience is how long the peer waits for something that must happen.
const patience = 90 * time.Second

// Peer has one queue pair, and memory for one send and one receive at a time. Its methods
// fail the test when the device returns an error.
type Peer struct {
	ID ibv.ID
	QP ibv.QP

	// To is the destination of its sends, and AH is the address handle for it.
	To ibv.UDParam
	AH ibv.AH

	t  testing.TB
	p  ibv.Provider
	pd ibv.PD
	cq ibv.CQ
	mr ibv.MR
	b  []byte
}

// received is the offset of the receive in the memory.
const received = 4096

// New makes a peer at a local address. Close ends it.
func New(t testing.TB, p ibv.Provider, at netip.Addr) *Peer {
	t.Helper()
	e := &Peer{t: t, p: p, b: make([]byte, 2*received)}
	var err error
	e.ID, err = p.BindUD(t.Context(), netip.AddrPortFrom(at, 0))
	require.NoError(t, err)
	dev := e.ID.Device()
	e.pd, err = dev.AllocPD()
	require.NoError(t, err)
	e.cq, err = dev.CreateCQ(64)
	require.NoError(t, err)
	e.QP, err = e.ID.CreateQP(e.pd, ibv.QPInit{SendCQ: e.cq, RecvCQ: e.cq, Cap: ibv.QPCap{MaxSendWR: 16, MaxRecvWR: 16, MaxSendSGE: 1, MaxRecvSGE: 1}})
	require.NoError(t, err)
	e.mr, err = e.pd.RegMR(e.b, ibv.AccessLocalWrite)
	require.NoError(t, err)
	return e
}

// Close releases everything.
func (e *Peer) Close() {
	e.t.Helper()
	if e.AH != nil {
		require.NoError(e.t, e.AH.Close())
	}
	for _, c := range []interface{ Close() error }{e.QP, e.mr, e.cq, e.pd, e.ID} {
		require.NoError(e.t, c.Close())
	}
}

// Ask resolves an address to a queue pair by the function Ask, and makes it the
// destination. It returns the local port of the request.
func (e *Peer) Ask(to netip.AddrPort) uint16 {
	e.t.Helper()
	id := Ask(e.t, e.p, netip.AddrPort{}, to, nil)
	e.Send(id.UDParam())
	require.NoError(e.t, id.Close())
	return id.LocalAddr().Port()
}

// Send sets where the peer sends.
func (e *Peer) Send(to ibv.UDParam) {
	e.t.Helper()
	var err error
	e.To = to
	e.AH, err = e.pd.CreateAH(to.AH)
	require.NoError(e.t, err)
}

// Answer sets where the peer sends: to the sender of the datagram that was received last.
func (e *Peer) Answer(wc *ibv.WC) {
	e.t.Helper()
	e.To = ibv.UDParam{QPN: wc.SrcQP, QKey: ibv.QKeyUDP}
	if e.AH == nil {
		var err error
		e.AH, err = e.pd.CreateAHFromWC(e.ID.Port(), wc, e.b[received:])
		require.NoError(e.t, err)
	}
}

// WR returns a work request that sends a payload.
func (e *Peer) WR(payload string) ibv.SendWR {
	n := copy(e.b, payload)
	return ibv.SendWR{Op: ibv.OpSend, Flags: ibv.SendSignaled, SGL: []ibv.SGE{{Buf: e.b[:n], LKey: e.mr.LKey()}},
		AH: e.AH, RemoteQPN: e.To.QPN, RemoteQKey: e.To.QKey}
}

// Post posts a send and waits for its completion.
func (e *Peer) Post(wr ibv.SendWR) {
	e.t.Helper()
	_, err := e.QP.PostSend([]ibv.SendWR{wr})
	require.NoError(e.t, err)
	require.Equal(e.t, ibv.WCSend, e.Next().Op)
}

// Expect posts a receive.
func (e *Peer) Expect() {
	e.t.Helper()
	_, err := e.QP.PostRecv([]ibv.RecvWR{{SGL: []ibv.SGE{{Buf: e.b[received:], LKey: e.mr.LKey()}}}})
	require.NoError(e.t, err)
}

// Poll returns the next completion, if there is one.
func (e *Peer) Poll() (wc ibv.WC, ok bool) {
	e.t.Helper()
	var wcs [1]ibv.WC
	n, err := e.cq.Poll(wcs[:])
	require.NoError(e.t, err)
	return wcs[0], n > 0
}

// Next waits for the next completion, which must be without an error.
func (e *Peer) Next() ibv.WC {
	e.t.Helper()
	for due := time.Now().Add(patience); time.Now().Before(due); time.Sleep(20 * time.Microsecond) {
		if wc, ok := e.Poll(); ok {
			require.Equal(e.t, ibv.WCSuccess, wc.Status)
			return wc
		}
	}
	e.t.Fatal("no completion")
	return ibv.WC{}
}

// Payload returns the payload of the datagram that was received last.
func (e *Peer) Payload(wc *ibv.WC) string {
	return string(e.b[received+ibv.GRHLen : received+int(wc.ByteLen)])
}

// Ask resolves an address to a queue pair, by a request from a local address with private
// data. The zero value of local leaves the address and the port to the device. The caller
// closes the ID.
func Ask(t testing.TB, p ibv.Provider, local, to netip.AddrPort, private []byte) ibv.ID {
	t.Helper()
	id, err := p.ResolveUD(t.Context(), local, to)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	require.NoError(t, id.Connect(ctx, ibv.ConnParam{Private: private}))
	return id
}
