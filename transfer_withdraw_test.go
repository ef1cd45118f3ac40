package rdmanet

import (
	"io"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/regmem"
	"github.com/rdmanet/rdmanet/internal/scripted"
	"github.com/rdmanet/rdmanet/internal/smbdpeer"
)

// A peer that withdraws its transfer at any moment: what was asked for comes,
// nothing else, and the stream goes on.
func TestTransferWithdrawn(t *testing.T) {
	const n = 3 << 20
	want := pattern(5, n)
	// settled returns how much was taken, when that is certain.
	settled := func(t *testing.T, p *smbdpeer.Raw, reads bool, id uint32, moved int) int {
		if !reads {
			return moved
		}
		h := p.ExpectTransfer(smbdpeer.Done)
		require.Equal(t, id, h.ID)
		require.LessOrEqual(t, int(h.Length), n)
		return int(h.Length)
	}
	for _, tt := range []struct {
		name string
		do   func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool) (moved int)
	}{
		{"at once", func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool) int { return 0 }},
		{"when some is read ahead", func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool) int {
			if !reads {
				g := p.ExpectTransfer(smbdpeer.Grant)
				require.Equal(t, ibv.WCSuccess, p.RDMA(ibv.OpWrite, want[:g.Length], g.Addr, g.Key))
				p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Written, ID: 1, Length: g.Length})
				return int(g.Length)
			}
			require.True(t, eventually(func() bool { return c.Stats().TransferBytesReceived > 0 }))
			return 0
		}},
		{"when a small Read waits", func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool) int {
			b := make([]byte, 10)
			read := reading(c, b)
			moved := 0
			if !reads {
				g := p.ExpectTransfer(smbdpeer.Grant)
				moved = int(g.Length)
				require.Equal(t, ibv.WCSuccess, p.RDMA(ibv.OpWrite, want[:moved], g.Addr, g.Key))
				p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Written, ID: 1, Length: g.Length})
			}
			require.Equal(t, result{10, nil}, s.await(read))
			defect.Bytes(t, want[:10], b)
			return moved - 10
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			eachTransferPeer(t, func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool) {
				addr, key := p.Register(want)
				p.Begin(reads, 1, n, addr, key)
				moved := tt.do(t, s, c, p, reads)
				p.WithdrawTransfer(reads, 1, 0)
				was := 0
				if tt.name == "when a small Read waits" {
					was = 10
				}
				taken := settled(t, p, reads, 1, moved+was) - was
				p.WaitCredit()
				p.Payload(100)
				b := make([]byte, taken+100)
				require.Equal(t, result{taken + 100, nil}, s.await(reading(c, b)))
				defect.Bytes(t, want[was:][:taken], b[:taken])
				defect.Bytes(t, smbdpeer.Segment(100, 0)[smbdpeer.PayloadOffset:], b[taken:])

				// And so does the next transfer.
				read := reading(c, b[:100])
				p.Begin(reads, 2, 100, addr, key)
				if !reads {
					for {
						if h := p.ExpectTransfer(smbdpeer.Grant); h.ID == 2 {
							require.Equal(t, ibv.WCSuccess, p.RDMA(ibv.OpWrite, want[:100], h.Addr, h.Key))
							p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Written, ID: 2, Length: 100})
							break
						}
					}
				}
				require.Equal(t, result{100, nil}, s.await(read))
				defect.Bytes(t, want[:100], b[:100])
			})
		})
	}
}

// A message that is withdrawn is none if nothing of it has come, and has no end otherwise.
func TestTransferWithdrawnMessageCut(t *testing.T) {
	eachTransferPeer(t, func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool) {
		const n = 1 << 20
		addr, key := p.Register(make([]byte, n))
		withdrawn := func(id uint32, payload []byte) { // before anything is fetched
			h := smbdpeer.Transfer{Kind: smbdpeer.Request, ID: id, Length: n}
			if reads {
				h.Kind, h.Addr, h.Key = smbdpeer.Offer, addr, key
			}
			waitCredits(t, p, 2)
			s.together(c, 2, func() {
				p.SendData(h.Message(payload))
				p.WithdrawTransfer(reads, id, smbdpeer.TransferCut)
			})
			if reads {
				require.Equal(t, smbdpeer.Transfer{Kind: smbdpeer.Done, ID: id}, p.ExpectTransfer(smbdpeer.Done))
			}
		}
		withdrawn(1, nil)
		p.WaitCredit()
		p.Payload(10)
		b := make([]byte, n+100)
		k, err := c.ReadMsg(b)
		require.NoError(t, err)
		require.Equal(t, 10, k)

		before := c.Stats().EmptyReceived
		withdrawn(2, make([]byte, 20))
		require.True(t, eventually(func() bool { return c.Stats().EmptyReceived > before })) // else the disconnect may overtake it
		p.ID.Disconnect()
		k, err = c.ReadMsg(b)
		require.Equal(t, 20, k)
		require.ErrorIs(t, err, errTruncated)
	})
}

// waitCredits receives until the peer has n credits.
func waitCredits(t testing.TB, p *smbdpeer.Raw, n int) {
	t.Helper()
	for p.Credits < n {
		_, _, ok := p.ReceiveData()
		require.True(t, ok, "the connection has ended")
	}
}

// A message that is withdrawn when all of it is on its way is whole.
func TestTransferWithdrawnTooLate(t *testing.T) {
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			const n = 100 << 10
			c, p, e := readsHeld(t, side.active)
			want := pattern(3, n)
			addr, key := p.Register(want)
			var asked atomic.Int64
			countReads(e, &asked)
			p.Begin(true, 1, n, addr, key)
			require.True(t, eventually(func() bool { return asked.Load() == n }), "%d bytes are asked for", asked.Load())
			before := c.Stats().EmptyReceived
			p.WithdrawTransfer(true, 1, smbdpeer.TransferCut)
			require.True(t, eventually(func() bool { return c.Stats().EmptyReceived > before }))
			e.Hold(nil)
			require.Equal(t, smbdpeer.Transfer{Kind: smbdpeer.Done, ID: 1, Length: n}, p.ExpectTransfer(smbdpeer.Done))
			p.WaitCredit()
			p.Payload(100)
			b := make([]byte, n+100)
			k, err := c.ReadMsg(b)
			require.NoError(t, err)
			defect.Bytes(t, want, b[:k])
			k, err = c.ReadMsg(b)
			require.NoError(t, err)
			require.Equal(t, 100, k)
		})
	}
}

// readsHeld makes a connection that does not learn of its RDMA Reads that have completed, until
// Hold(nil).
func readsHeld(t *testing.T, active bool) (*Conn, *smbdpeer.Raw, *scripted.Endpoint) {
	s := newScene(t)
	c, p := s.transferConns(active, true)
	e := s.end(c)
	e.Hold(func(wc *ibv.WC) bool { return wc.Op == ibv.WCRead })
	return c, p, e
}

// countReads counts the bytes of the RDMA Reads that an end posts.
func countReads(e *scripted.Endpoint, n *atomic.Int64) {
	e.OnPostSend(func(wrs []ibv.SendWR) error {
		for i := range wrs {
			if wrs[i].Op == ibv.OpRead {
				n.Add(int64(len(wrs[i].SGL[0].Buf)))
			}
		}
		return nil
	})
}

// Whoever is asked for a transfer back says with each RDMA Read that comes that it goes on,
// until it says that it is done.
func TestTransferWithdrawnProgress(t *testing.T) {
	if attr := testDevice(t).Attr(); min(attr.MaxQPInitRdAtom, attr.MaxQPRdAtom) < 3 { // one is for keep-alive
		return // there is one RDMA Read at a time
	}
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			const n = 2 * regmem.ChunkSize
			c, p, e := readsHeld(t, side.active)
			want := pattern(3, n)
			addr, key := p.Register(want)
			p.Begin(true, 1, n, addr, key)
			require.True(t, eventually(func() bool { return e.Reading() == 2 }))
			received := c.Stats().EmptyReceived
			p.WithdrawTransfer(true, 1, 0)
			require.True(t, eventually(func() bool { return c.Stats().EmptyReceived > received }))
			// There is nothing to grant any more, but for the receive that is kept for messages
			// about transfers.
			require.True(t, eventually(func() bool {
				p.RequestResponse(1)
				receiveAll(t, c, p)
				return c.Stats().ReceiveCredits == p.Credits+1
			}))
			requireSleeper(t, e, func() bool { return true })
			sent := c.Stats().EmptySent
			e.Pass(1)
			require.True(t, eventually(func() bool { return c.Stats().EmptySent > sent }), "nothing is said of the first RDMA Read")
			require.Equal(t, 1, e.Reading(), "the transfer is over")
			e.Hold(nil)
			require.Equal(t, smbdpeer.Transfer{Kind: smbdpeer.Done, ID: 1, Length: n}, p.ExpectTransfer(smbdpeer.Done))
			b := make([]byte, n)
			k, err := c.Read(b)
			require.NoError(t, err)
			defect.Bytes(t, want[:k], b[:k])
		})
	}
}

// A Read whose grants become void goes on where the bytes have ended that came, with
// what is sent behind the transfer that was withdrawn.
func TestTransferWithdrawnGrants(t *testing.T) {
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			s := newScene(t)
			s.cfg.InitialReceiveCredits, s.cfg.MaxReceiveCredits = 16, 16
			c, p := s.transferConns(side.active, false)
			p.Grant(maxTransfers)
			b := make([]byte, (maxTransfers+1)*fetchSize) // more than may be granted at a time
			read := make(chan result, 1)
			parked(t, func() { // else what is offered may be fetched for nobody
				n, err := c.Read(b)
				read <- result{n, err}
			})
			p.Begin(false, 1, len(b), 0, 0)
			first := p.ExpectTransfer(smbdpeer.Grant)
			for range maxTransfers - 1 {
				p.ExpectTransfer(smbdpeer.Grant)
			}

			waitCredits(t, p, 3)
			s.together(c, 3, func() {
				p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Written, ID: 1, Length: first.Length})
				p.WithdrawTransfer(false, 1, 0)
				p.Begin(false, 2, 100, 0, 0)
			})

			g := p.ExpectTransfer(smbdpeer.Grant)
			require.EqualValues(t, 2, g.ID)
			want := pattern(1, 100)
			require.Equal(t, ibv.WCSuccess, p.RDMA(ibv.OpWrite, want, g.Addr, g.Key))
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Written, ID: 2, Length: g.Length})
			require.Equal(t, result{int(first.Length) + 100, nil}, s.await(read))
			defect.Bytes(t, want, b[first.Length:][:100])
		})
	}
}

// A peer that begins transfers and takes them back again and again fills no memory
// while nobody reads: what has never been is not kept for the reader.
func TestTransferWithdrawnNotQueued(t *testing.T) {
	const rounds = 200
	for _, inside := range []bool{false, true} { // a message of several transfers
		t.Run(map[bool]string{false: "messages", true: "parts of one"}[inside], func(t *testing.T) {
			eachTransferPeer(t, func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool) {
				h := smbdpeer.Transfer{Kind: smbdpeer.Request, Length: 1}
				flags := uint8(0)
				if reads {
					h.Kind = smbdpeer.Offer
					h.Addr, h.Key = p.Register(make([]byte, 10))
				}
				if inside {
					flags, h.Rest = smbdpeer.TransferCut, rounds
					p.SendData(smbdpeer.Transfer{Kind: h.Kind, Addr: h.Addr, Key: h.Key, Rest: h.Rest}.Message(make([]byte, 10)))
					b := make([]byte, 10)
					require.Equal(t, result{10, nil}, s.await(reading(c, b)))
				}
				for range rounds {
					h.ID++
					if inside {
						h.Rest--
					}
					waitCredits(t, p, 2)
					s.together(c, 2, func() {
						p.SendTransfer(h)
						p.WithdrawTransfer(reads, h.ID, flags)
					})
					if reads {
						require.Equal(t, smbdpeer.Transfer{Kind: smbdpeer.Done, ID: h.ID}, p.ExpectTransfer(smbdpeer.Done))
					}
				}
				require.True(t, eventually(func() bool { return c.Stats().EmptyReceived >= 2*rounds }))
				require.LessOrEqual(t, unread(c), 1)
				if inside {
					return // the message has no end
				}
				p.WaitCredit()
				p.Payload(100)
				b := make([]byte, 100)
				require.Equal(t, result{100, nil}, s.await(reading(c, b)))
				defect.Bytes(t, smbdpeer.Segment(100, 0)[smbdpeer.PayloadOffset:], b)
			})
		})
	}
}

// unread is the length of the queue of what the program has not read. The tests look inside for
// it: entries without bytes take memory, but nothing else shows them.
func unread(c *Conn) int {
	c.mu.Lock()
	defer c.unlock()
	return c.in.unread.Len()
}

// What was granted for nobody and is withdrawn leaves no memory in use.
func TestTransferWithdrawnUnreadMemory(t *testing.T) {
	s := newScene(t)
	c, p := s.transferConns(true, false)
	before := countScratch()
	for id := range uint32(3 * maxBounceBuffers) {
		p.Begin(false, id+1, 1000, 0, 0)
		require.Equal(t, id+1, p.ExpectTransfer(smbdpeer.Grant).ID)
		p.WithdrawTransfer(false, id+1, 0)
	}
	require.True(t, eventually(func() bool { return c.Stats().EmptyReceived >= 2*3*maxBounceBuffers }))
	if !eventually(func() bool { return countScratch() == before }) {
		defect.Leak(t, "%d chunks in use, %d before", countScratch(), before)
	}
	require.Zero(t, unread(c))
}

// A ReadMsg that waits for a message that is withdrawn does not take the next one for
// it, which is longer than there is room for.
func TestTransferWithdrawnDuringReadMsg(t *testing.T) {
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			s := newScene(t)
			s.cfg.InitialReceiveCredits, s.cfg.MaxReceiveCredits = 16, 16
			c, p := s.transferConns(side.active, false)
			b := make([]byte, 600<<10)
			read := make(chan result, 1)
			parked(t, func() {
				n, err := c.ReadMsg(b)
				read <- result{n, err}
			})
			p.Begin(false, 1, len(b), 0, 0)
			p.ExpectTransfer(smbdpeer.Grant)

			waitCredits(t, p, 2)
			s.together(c, 2, func() {
				p.WithdrawTransfer(false, 1, smbdpeer.TransferCut)
				p.Begin(false, 2, len(b)+1, 0, 0)
			})
			require.Equal(t, result{len(b) + 1, io.ErrShortBuffer}, plain(s.await(read)))
		})
	}
}

// A part of a message that is withdrawn as a whole ends the message all the same,
// if its sender does not say that the message is cut.
func TestTransferWithdrawnEndsMessage(t *testing.T) {
	eachTransferPeer(t, func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool) {
		h := smbdpeer.Transfer{Kind: smbdpeer.Request, ID: 1, Length: 1000}
		if reads {
			h.Kind = smbdpeer.Offer
			h.Addr, h.Key = p.Register(make([]byte, 1000))
		}
		waitCredits(t, p, 2)
		s.together(c, 2, func() {
			p.SendData(h.Message([]byte("beginning")))
			p.WithdrawTransfer(reads, 1, 0)
		})
		p.WaitCredit()
		p.Payload(100)
		b := make([]byte, 2000)
		n, err := c.ReadMsg(b)
		require.NoError(t, err)
		defect.Bytes(t, "beginning", b[:n])
		n, err = c.ReadMsg(b)
		require.NoError(t, err)
		require.Equal(t, 100, n)
	})
}

// A peer withdraws a transfer as a whole while a Read lends it memory, ends its stream and
// closes, all before the Read looks again. The Read finds the end of the stream.
func TestTransferWithdrawnThenClosed(t *testing.T) {
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			s := newScene(t)
			c, p := s.transferConns(side.active, false)
			e := s.end(c)
			read := readingParked(t, c, make([]byte, 1<<20))
			p.Begin(false, 1, 100<<10, 0, 0)
			p.ExpectTransfer(smbdpeer.Grant)
			var hold atomic.Bool
			hold.Store(true)
			received := func(wc *ibv.WC) bool { return !e.IsSend(wc) }
			e.Hold(func(wc *ibv.WC) bool { return hold.Load() && received(wc) })
			p.WithdrawTransfer(false, 1, 0)
			p.Send(smbdpeer.EmptySegment(smbdpeer.FlagFIN, 0))
			requireSleeper(t, e, func() bool { return e.Held(received) == 2 })
			hold.Store(false) // which wakes nobody: the disconnect does
			require.NoError(t, p.ID.Disconnect())
			var r result
			within(t, "Read", func() { r = <-read })
			require.Equal(t, result{0, io.EOF}, r)
		})
	}
}
