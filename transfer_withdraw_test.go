package rdmanet

import (
	"bytes"
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
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
			require.Equal(t, want[:10], b)
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
				require.True(t, bytes.Equal(want[was:][:taken], b[:taken]))
				require.Equal(t, smbdpeer.Segment(100, 0)[smbdpeer.PayloadOffset:], b[taken:])

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
				require.Equal(t, want[:100], b[:100])
			})
		})
	}
}

// A message that is withdrawn is none if nothing of it has come, and has no end
// otherwise.
func TestTransferWithdrawnMessageCut(t *testing.T) {
	eachTransferPeer(t, func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool) {
		kind := smbdpeer.Request
		if reads {
			kind = smbdpeer.Offer
		}
		withdrawn := func(id uint32) {
			p.WithdrawTransfer(reads, id, smbdpeer.TransferCut)
			if reads {
				for h := p.ExpectTransfer(smbdpeer.Done); h.ID != id; h = p.ExpectTransfer(smbdpeer.Done) {
				}
			}
		}
		const n = 1 << 20
		addr, key := p.Register(make([]byte, n))
		h := smbdpeer.Transfer{Kind: kind, ID: 1, Addr: addr, Key: key, Length: n}
		c.rx.reading++ // somebody is about to read, so nothing is fetched ahead
		p.SendTransfer(h)
		withdrawn(1)
		p.WaitCredit()
		p.Payload(10)
		b := make([]byte, n+100)
		k, err := c.ReadMsg(b)
		require.NoError(t, err)
		require.Equal(t, 10, k)

		h.ID = 2
		p.WaitCredit()
		p.Credits--
		p.Send(h.Message(make([]byte, 20)))
		withdrawn(2)
		require.True(t, eventually(func() bool { // else the disconnect may overtake it
			c.mu.Lock()
			defer c.unlock()
			return c.rx.last == 2 && c.rx.live.Len() == 0
		}))
		p.ID.Disconnect()
		k, err = c.ReadMsg(b)
		require.Equal(t, 20, k)
		require.ErrorIs(t, err, errTruncated)
	})
}

// A message that is withdrawn when all of it is on its way is whole.
func TestTransferWithdrawnTooLate(t *testing.T) {
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			s := newScene(t)
			c, p := s.transferConns(side.active, true)
			const n = 100 << 10
			want := pattern(3, n)
			addr, key := p.Register(want)
			c.mu.Lock()
			c.rx.reading++ // somebody is about to read, so nothing is fetched ahead
			c.unlock()
			p.Begin(true, 1, n, addr, key)
			require.True(t, eventually(func() bool {
				c.mu.Lock()
				defer c.unlock()
				c.poll()
				if c.rx.live.Len() == 0 {
					return false
				}
				c.readAhead()
				require.NoError(t, c.withdrawn(&transferHeader{Kind: transferWithdraw, ID: 1, Flags: transferCut}))
				return true
			}))
			p.WaitCredit()
			p.Payload(100)
			b := make([]byte, n+100)
			k, err := c.ReadMsg(b)
			require.NoError(t, err)
			require.Equal(t, n, k)
			require.True(t, bytes.Equal(want, b[:n]))
			k, err = c.ReadMsg(b)
			require.NoError(t, err)
			require.Equal(t, 100, k)
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
			go func() {
				n, err := c.Read(b)
				read <- result{n, err}
			}()
			c.awaitReader(t) // else what is offered may be fetched for nobody
			p.Begin(false, 1, len(b), 0, 0)
			first := p.ExpectTransfer(smbdpeer.Grant)
			for range maxTransfers - 1 {
				p.ExpectTransfer(smbdpeer.Grant)
			}

			c.mu.Lock() // the reader hears of all of it at once
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Written, ID: 1, Length: first.Length})
			p.WithdrawTransfer(false, 1, 0)
			p.Begin(false, 2, 100, 0, 0)
			for c.rx.last < 2 {
				c.poll()
			}
			c.unlock()

			g := p.ExpectTransfer(smbdpeer.Grant)
			require.EqualValues(t, 2, g.ID)
			want := pattern(1, 100)
			require.Equal(t, ibv.WCSuccess, p.RDMA(ibv.OpWrite, want, g.Addr, g.Key))
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Written, ID: 2, Length: g.Length})
			require.Equal(t, result{int(first.Length) + 100, nil}, s.await(read))
			require.Equal(t, want, b[first.Length:][:100])
		})
	}
}

// A peer that begins transfers and takes them back again and again fills no memory
// while nobody reads: what has never been is not kept for the reader.
func TestTransferWithdrawnNotQueued(t *testing.T) {
	const rounds = 200
	unread := func(c *Conn) int {
		c.mu.Lock()
		defer c.unlock()
		return c.in.unread.Len()
	}
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
				c.noScratch(true)
				for range rounds {
					h.ID++
					if inside {
						h.Rest--
					}
					p.SendTransfer(h)
					p.WithdrawTransfer(reads, h.ID, flags)
				}
				s.withdrawn(c, rounds)
				require.LessOrEqual(t, unread(c), 1)
				c.noScratch(false)
				if inside {
					return // the message has no end
				}
				p.WaitCredit()
				p.Payload(100)
				b := make([]byte, 100)
				require.Equal(t, result{100, nil}, s.await(reading(c, b)))
				require.Equal(t, smbdpeer.Segment(100, 0)[smbdpeer.PayloadOffset:], b)
			})
		})
	}
}

// What was granted for nobody and is withdrawn leaves no memory in use.
func TestTransferWithdrawnUnreadMemory(t *testing.T) {
	s := newScene(t)
	c, p := s.transferConns(true, false)
	for id := range uint32(3 * maxBounceBuffers) {
		p.Begin(false, id+1, 1000, 0, 0)
		require.Equal(t, id+1, p.ExpectTransfer(smbdpeer.Grant).ID)
		p.WithdrawTransfer(false, id+1, 0)
	}
	s.withdrawn(c, 3*maxBounceBuffers)
	c.mu.Lock()
	defer c.unlock()
	require.Zero(t, c.rx.bounceBuffers)
	require.Zero(t, c.in.unread.Len())
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
			go func() {
				n, err := c.ReadMsg(b)
				read <- result{n, err}
			}()
			c.awaitReader(t)
			p.Begin(false, 1, len(b), 0, 0)
			p.ExpectTransfer(smbdpeer.Grant)

			c.mu.Lock() // the reader hears of all of it at once
			p.WithdrawTransfer(false, 1, smbdpeer.TransferCut)
			p.Begin(false, 2, len(b)+1, 0, 0)
			for c.rx.last < 2 {
				c.poll()
			}
			c.unlock()
			require.Equal(t, result{len(b) + 1, io.ErrShortBuffer}, plain(s.await(read)))
		})
	}
}

// noScratch has the connection believe that it has fetched all that it may ahead of
// its reader.
func (c *conn) noScratch(used bool) {
	c.mu.Lock()
	defer c.unlock()
	if used {
		c.rx.bounceBuffers += maxBounceBuffers
	} else {
		c.rx.bounceBuffers -= maxBounceBuffers
	}
}

// withdrawn waits until transfer id is over, and no other has begun.
func (s *scene) withdrawn(c *Conn, id uint32) {
	s.t.Helper()
	require.True(s.t, eventually(func() bool {
		c.mu.Lock()
		defer c.unlock()
		c.poll()
		return c.rx.last == id && c.rx.live.Len() == 0
	}))
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
		c.noScratch(true)
		p.WaitCredit()
		p.Credits--
		p.Send(h.Message([]byte("beginning")))
		p.WithdrawTransfer(reads, 1, 0)
		s.withdrawn(c, 1)
		c.noScratch(false)
		p.WaitCredit()
		p.Payload(100)
		b := make([]byte, 2000)
		n, err := c.ReadMsg(b)
		require.NoError(t, err)
		require.Equal(t, "beginning", string(b[:n]))
		n, err = c.ReadMsg(b)
		require.NoError(t, err)
		require.Equal(t, 100, n)
	})
}
