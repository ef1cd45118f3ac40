package rdmanet

import (
	"bytes"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/regmem"
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

// regions tells of those that the peer may write to, which are counted from 1, before
// they are made and before they are closed.
type regions struct {
	n             int
	opens, closes func(n int)
}

type watchedMR struct {
	ibv.MR
	closes func()
}

func (m *watchedMR) Close() error {
	m.closes()
	return m.MR.Close()
}

func (r *regions) reg(register func([]byte, ibv.Access) (ibv.MR, error), b []byte, access ibv.Access) (ibv.MR, error) {
	if access&ibv.AccessRemoteWrite == 0 {
		return register(b, access)
	}
	r.n++
	n := r.n
	r.opens(n)
	mr, err := register(b, access)
	if err != nil {
		return nil, err
	}
	return &watchedMR{mr, func() { r.closes(n) }}, nil
}

type watchedQP struct {
	ibv.QP
	regions
}

func (q *watchedQP) RegMR(b []byte, access ibv.Access) (ibv.MR, error) {
	return q.reg(q.QP.RegMR, b, access)
}

type watchedPD struct {
	ibv.PD
	regions
}

func (p *watchedPD) RegMR(b []byte, access ibv.Access) (ibv.MR, error) {
	return p.reg(p.PD.RegMR, b, access)
}

// watched is a connection with a peer that writes, of which nothing is fetched ahead.
func (s *scene) watched(opens, closes func(n int)) (*Conn, *smbdpeer.Raw) {
	s.cfg.KeepAlive = time.Hour // it would send what is due
	c, p := s.transferConns(true, false)
	c.mu.Lock()
	defer c.unlock()
	r := regions{opens: opens, closes: closes}
	if c.dom.Private {
		c.dom.PD = &watchedPD{c.dom.PD, r}
	} else {
		c.lane.qp = &watchedQP{c.lane.qp, r}
	}
	c.rx.reading++ // somebody is about to read
	return c, p
}

// The peer writes to the first piece of a reader's memory while the next one is
// registered.
func TestTransferGrantPieces(t *testing.T) {
	gate := make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) })
	s := newScene(t)
	t.Cleanup(open)
	c, p := s.watched(func(n int) {
		if n == 2 {
			<-gate
		}
	}, func(int) {})
	want := pattern(1, fetchSize+1000)
	p.Begin(false, 1, len(want), 0, 0)
	require.True(t, eventually(func() bool {
		c.mu.Lock()
		defer c.unlock()
		return c.in.unread.Len() > 0 && c.wait.Sleeping() // so nobody else sends what is due
	}))
	b := make([]byte, len(want))
	read := reading(c, b)
	g := p.ExpectTransfer(smbdpeer.Grant)
	require.EqualValues(t, fetchSize, g.Length)
	require.Equal(t, ibv.WCSuccess, p.RDMA(ibv.OpWrite, want[:fetchSize], g.Addr, g.Key))
	p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Written, ID: 1, Length: fetchSize})
	open()
	g = p.ExpectTransfer(smbdpeer.Grant)
	require.EqualValues(t, 1000, g.Length)
	require.Equal(t, ibv.WCSuccess, p.RDMA(ibv.OpWrite, want[fetchSize:], g.Addr, g.Key))
	p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Written, ID: 1, Length: 1000})
	require.Equal(t, result{len(want), nil}, s.await(read))
	require.True(t, bytes.Equal(want, b))
}

// A Buffer that is freed in the middle of a Read goes back to the system when nothing
// of it is open any more, nor what was registered since.
func TestTransferGrantBufferFreed(t *testing.T) {
	const pieces = maxTransfers + 1 // one more than may be granted at a time
	buf := alloc(t, pieces*fetchSize)
	var uses []int // as the pieces are closed
	s := newScene(t)
	c, p := s.watched(func(int) {}, func(int) {
		uses = append(uses, buf.mem.Uses())
	})
	p.Grant(2 * pieces)
	p.Begin(false, 1, pieces*fetchSize, 0, 0)
	read := reading(c, buf.Bytes())
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
	require.Len(t, uses, pieces)
	require.NotContains(t, uses, 0, "given back with a piece still open")
}
