package rdmanet

import (
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/regmem"
	"github.com/rdmanet/rdmanet/internal/scripted"
	"github.com/rdmanet/rdmanet/internal/smbdpeer"
)

// What nobody reads is fetched as far as scratch goes, however few RDMA Reads may be
// under way.
func TestTransferPrefetchBounded(t *testing.T) {
	s := newScene(t)
	s.cfg.TransferSize, s.cfg.LingerTimeout = minTransfer, -1
	c, p := s.conns(true, smbdpeer.PrivateData{IRD: 2, ORD: 2, Rdmanet: true, Features: smbdpeer.FeatureFIN | smbdpeer.FeatureTransfer, MaxReceiveSize: 8136}.Append(nil))
	p.BeginFirst(true, 2*maxBounceBuffers*regmem.ChunkSize)
	require.True(t, eventually(func() bool { return c.Stats().TransferBytesReceived == maxBounceBuffers*regmem.ChunkSize }))
}

// onPeerWrites has functions called with the number of each region that the peer may write to,
// counted from 1: before it is made, and before it is closed.
func onPeerWrites(e *scripted.Endpoint, opens, closes func(n int)) {
	var made atomic.Int64
	e.OnRegister(func(_ []byte, access ibv.Access) (closing func(), err error) {
		if access&ibv.AccessRemoteWrite == 0 {
			return nil, nil
		}
		n := int(made.Add(1))
		opens(n)
		return func() { closes(n) }, nil
	})
}

// The peer writes to the first piece of a reader's memory while the next one is
// registered.
func TestTransferGrantPieces(t *testing.T) {
	gate := make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) })
	s := newScene(t)
	t.Cleanup(open)
	c, p := s.transferConns(true, false)
	onPeerWrites(s.end(c), func(n int) {
		if n == 2 {
			<-gate
		}
	}, func(int) {})
	want := pattern(1, fetchSize+1000)
	b := make([]byte, len(want))
	read := readingParked(t, c, b)
	p.Begin(false, 1, len(want), 0, 0)
	g := p.ExpectTransfer(smbdpeer.Grant)
	require.EqualValues(t, fetchSize, g.Length)
	p.Answer(g, want[:fetchSize])
	open()
	g = p.ExpectTransfer(smbdpeer.Grant)
	require.EqualValues(t, 1000, g.Length)
	p.Answer(g, want[fetchSize:])
	require.Equal(t, result{len(want), nil}, s.await(read))
	defect.Bytes(t, want, b)
}

// A Buffer that is freed in the middle of a Read goes back to the system when nothing
// of it is open any more, nor what was registered since.
func TestTransferGrantBufferFreed(t *testing.T) {
	const pieces = maxTransfers + 1 // one more than may be granted at a time
	buf := alloc(t, pieces*fetchSize)
	b := buf.Bytes()
	var mapped []bool // as the pieces are closed
	s := newScene(t)
	c, p := s.transferConns(true, false)
	onPeerWrites(s.end(c), func(int) {}, func(int) { mapped = append(mapped, regmem.Find(b) != nil) })
	p.Grant(2 * pieces)
	read := readingParked(t, c, b)
	p.Begin(false, 1, pieces*fetchSize, 0, 0)
	for range maxTransfers {
		p.ExpectTransfer(smbdpeer.Grant)
	}
	buf.Free()
	p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Written, ID: 1, Length: fetchSize})
	p.ExpectTransfer(smbdpeer.Grant) // of the last piece
	for range maxTransfers {
		p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Written, ID: 1, Length: fetchSize})
	}
	require.Equal(t, result{pieces * fetchSize, nil}, s.await(read))
	require.Len(t, mapped, pieces)
	require.NotContains(t, mapped, false, "given back with a piece still open")
	require.True(t, eventually(func() bool { return regmem.Find(b) == nil }), "it is never given back")
}
