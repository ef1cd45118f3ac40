package rdmanet

import (
	"bytes"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/smbdpeer"
)

// requireDenied has a peer use a key that must not serve, on its connection with
// victim, which that ends.
func (s *scene) requireDenied(t *testing.T, culprit *smbdpeer.Raw, victim *Conn, op ibv.Opcode, addr uint64, key uint32) {
	t.Helper()
	b := pattern(9, 100)
	status := culprit.RDMA(op, b, addr, key)
	if overIWARP(t) {
		if op == ibv.OpRead {
			require.NotEqual(t, ibv.WCSuccess, status)
		}
		culprit.WaitEnd() // on this side a Write is over before the other one sees it
	} else {
		// The other side's disconnect may be faster than its device's refusal.
		require.Contains(t, []ibv.WCStatus{ibv.WCRemAccessErr, ibv.WCFlushErr}, status)
		s.end(victim).Disconnect() // nobody else does, with a peer that only waits
	}
	require.Equal(t, pattern(9, 100), b, "something was read")
}

// countingReader counts the bytes that were read.
type countingReader struct {
	io.Reader
	n *atomic.Int64
}

func (r countingReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	r.n.Add(int64(n))
	return n, err
}

// A peer that keeps a key, widens it, uses it for what it is not meant for or
// passes it to a neighbour gets an access error on the connection that it uses it
// on, and nothing else.
func TestTransferKeys(t *testing.T) {
	const n = breachWrite
	const (
		live = iota
		done
		withdrawn
		closed
	)
	type try struct {
		name      string
		when      int
		neighbour bool                   // tries it
		at        func(length int) int64 // of 100 bytes
		other     bool                   // RDMA Write in place of Read, or the other way round
	}
	begin := func(int) int64 { return 0 }
	tries := []try{
		{"one byte before", live, false, func(int) int64 { return -1 }, false},
		{"one byte behind", live, false, func(n int) int64 { return int64(n) - 99 }, false},
		{"far behind", live, false, func(n int) int64 { return int64(n) + 1<<30 }, false},
		{"the other operation", live, false, begin, true},
		{"by a neighbour", live, true, begin, false},
		{"by a neighbour, the other operation", live, true, begin, true},
	}
	for _, other := range []bool{false, true} {
		op := ""
		if other {
			op = ", the other operation"
		}
		tries = append(tries,
			try{"after done" + op, done, false, begin, other},
			try{"after done, by a neighbour" + op, done, true, begin, other},
			try{"after withdrawal" + op, withdrawn, false, begin, other},
			try{"after Close, by a neighbour" + op, closed, true, begin, other})
	}
	for _, m := range transferPeers {
		op := map[bool]ibv.Opcode{true: ibv.OpRead, false: ibv.OpWrite}
		for _, tt := range tries {
			if !m.reads && tt.other && tt.when == live && !tt.neighbour && testDevice(t).Attr().Quirks.ReadsUnchecked {
				continue // the device says so of itself
			}
			t.Run(m.name+"/"+tt.name, func(t *testing.T) {
				eachKeyDevice(t, func(t *testing.T, dev *modest) {
					for _, heap := range []bool{true, false} {
						setWithdrawWithin(t, time.Second)
						s := newSceneOn(t, dev)
						c, p := s.transferConns(false, m.reads)
						neighbour, q := s.transferConns(false, m.reads)
						mem := bytes.Repeat([]byte{1}, n+200)[100:][:n]
						if !heap {
							mem = alloc(t, n+200).Bytes()[100:][:n] // as open as the transfer, not as the Buffer
							copy(mem, bytes.Repeat([]byte{1}, n))
						}
						var call chan result
						var h smbdpeer.Transfer
						var got atomic.Int64 // bytes that were read
						if m.reads {
							call = writing(c, mem)
							h = p.ExpectBegin(true)
						} else {
							call = make(chan result, 1)
							go func() {
								n, err := io.ReadFull(countingReader{c, &got}, mem)
								call <- result{n, err}
							}()
							p.Begin(false, 1, n, 0, 0)
							h = p.ExpectTransfer(smbdpeer.Grant)
						}
						finish := func() {
							b := pattern(2, int(h.Length))
							require.Equal(t, ibv.WCSuccess, p.RDMA(op[m.reads], b, h.Addr, h.Key))
							if m.reads {
								defect.Bytes(t, mem[n-len(b):], b)
								p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Done, ID: 1, Length: h.Length})
							} else {
								p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Written, ID: 1, Length: h.Length})
							}
							require.Equal(t, result{n, nil}, s.await(call))
						}
						switch tt.when {
						case done:
							finish()
						case withdrawn:
							if m.reads {
								c.SetWriteDeadline(time.Unix(1, 0))
								p.ExpectTransfer(smbdpeer.Withdraw)
								p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Done, ID: 1})
							} else {
								p.WithdrawTransfer(false, 1, 0)
								p.Payload(10) // is what the Read gets then
							}
							if m.reads {
								require.ErrorIs(t, s.await(call).err, os.ErrDeadlineExceeded)
							} else {
								require.True(t, eventually(func() bool { return got.Load() == 10 }))
								c.SetReadDeadline(time.Unix(1, 0))
								require.Equal(t, 10, s.await(call).n)
							}
						case closed:
							var heard sync.WaitGroup
							heard.Go(p.WaitEnd)
							within(t, "Close", func() { c.Close() })
							heard.Wait()
							require.Error(t, s.await(call).err)
						}
						before := bytes.Clone(mem)
						culprit, victim := p, c
						if tt.neighbour {
							culprit, victim = q, neighbour
						}
						s.requireDenied(t, culprit, victim, op[m.reads != tt.other], h.Addr+uint64(tt.at(int(h.Length))), h.Key)
						switch {
						case tt.when == live && tt.neighbour:
							finish() // nothing has happened here
						case tt.when == live:
							if r := s.await(call); m.reads {
								require.Error(t, r.err)
							}
						}
						if tt.when != live || m.reads {
							require.Equal(t, before, mem, "something was written")
						}
						if !tt.neighbour {
							q.WaitCredit()
							q.Payload(10)
							_, err := neighbour.Read(make([]byte, 10))
							require.NoError(t, err)
						}
						require.NoError(t, neighbour.Close())
						c.Close()
					}
				})
			})
		}
	}
}
