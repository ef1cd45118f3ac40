package rdmanet

import (
	"fmt"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/smbdpeer"
)

// How long a call waits for its memory that a peer is at work on.

// heldCall has a Write, or a Read, miss its deadline while the peer is at work on its memory.
// The connection is one of a fabric, and has no keep-alive.
func heldCall(t *testing.T, active, write bool, before func(s *scene, c *Conn, p *smbdpeer.Raw)) (s *scene, c *Conn, p *smbdpeer.Raw, ended chan result) {
	t.Helper()
	s = newFabricScene(t)
	s.cfg.KeepAlive = -1
	c, p = s.transferConns(active, write)
	c.SetDeadline(time.Time{})
	before(s, c, p)
	if write {
		ended = writing(c, alloc(t, breachWrite).Bytes())
		p.ExpectBegin(true)
		synctest.Wait()
		c.SetWriteDeadline(past)
		p.ExpectTransfer(smbdpeer.Withdraw)
		return s, c, p, ended
	}
	ended = readingParked(t, c, make([]byte, heldRead))
	p.Begin(false, 1, heldRead, 0, 0)
	require.EqualValues(t, heldRead, p.ExpectTransfer(smbdpeer.Grant).Length)
	synctest.Wait()
	c.SetReadDeadline(past)
	return s, c, p, ended
}

const heldRead = 1 << 20

// CloseWrite ends a Write in the middle of a transfer. Neither has a deadline, so they wait for
// a silent peer until it lets go of the memory, and the connection goes on.
func TestCloseWriteWaitsForMemory(t *testing.T) {
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			inVirtualTime(t, func(t *testing.T) {
				s := newFabricScene(t)
				s.cfg.KeepAlive = -1
				c, p := s.transferConns(side.active, true)
				c.SetDeadline(time.Time{})
				ended := writing(c, alloc(t, breachWrite).Bytes())
				p.ExpectBegin(true)
				synctest.Wait()
				over := make(chan error, 1)
				go func() { over <- c.CloseWrite() }()
				p.ExpectTransfer(smbdpeer.Withdraw)
				time.Sleep(100 * withdrawWithin)
				require.Empty(t, ended)
				require.Empty(t, over)
				p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Done, ID: 1})
				r := s.await(ended)
				require.Zero(t, r.n)
				require.ErrorIs(t, r.err, errWriteClosed)
				p.ExpectFIN()
				require.NoError(t, <-over)
			})
		})
	}
}

// say sends a message of no consequence.
func say(p *smbdpeer.Raw) {
	p.WaitCredit()
	p.Grant(1)
}

// A call that misses its deadline in the middle of a transfer waits for the peer to let go of
// the memory: withdrawWithin after the last sign of life, be it a message or an RDMA Write that
// completes, and no more than twelve times as long in all. Then it ends, and the connection
// too.
func TestTransferPatience(t *testing.T) {
	type sign struct {
		minute int  // after the deadline
		write  bool // an RDMA Write completes, else a message comes
	}
	always := make([]sign, 0, 100)
	for minute := 10; minute < 1000; minute += 10 {
		always = append(always, sign{minute, false})
	}
	for _, tt := range []struct {
		name  string
		signs []sign
		ends  int // minutes after the deadline
	}{
		{"silence", nil, 60},
		{"a message", []sign{{59, false}}, 119},
		{"two messages", []sign{{30, false}, {80, false}}, 140},
		{"a message too late", []sign{{61, false}}, 60},
		{"an RDMA Write", []sign{{50, true}}, 110},
		{"a message, then an RDMA Write", []sign{{40, false}, {50, true}}, 110},
		{"an RDMA Write, then a message", []sign{{40, true}, {50, false}}, 110},
		{"messages all the time", always, 720},
	} {
		for _, side := range sides {
			for call, write := range map[string]bool{"Write": true, "Read": false} {
				completes := false // an RDMA Write does
				for _, s := range tt.signs {
					completes = completes || s.write
				}
				if completes && write {
					continue // transfers go by RDMA Read
				}
				t.Run(fmt.Sprintf("%s/%s/%s", tt.name, call, side.name), func(t *testing.T) {
					inVirtualTime(t, func(t *testing.T) {
						setWithdrawWithin(t, time.Hour)
						s, c, p, ended := heldCall(t, side.active, write, func(s *scene, c *Conn, p *smbdpeer.Raw) {
							if !completes {
								return
							}
							s.end(c).Hold(func(wc *ibv.WC) bool { return wc.Op == ibv.WCWrite })
							writing(c, alloc(t, breachWrite).Bytes())
							h := p.ExpectBegin(false)
							addr, key := p.Register(make([]byte, h.Length))
							p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Grant, ID: h.ID, Addr: addr, Key: key, Length: h.Length})
							p.ExpectTransfer(smbdpeer.Written)
						})
						missed := time.Now()
						for _, sign := range tt.signs {
							at := missed.Add(time.Duration(sign.minute) * time.Minute)
							if !at.Before(missed.Add(time.Duration(tt.ends) * time.Minute)) {
								break
							}
							time.Sleep(time.Until(at))
							require.Empty(t, ended, "the call has ended before minute %d", sign.minute)
							if sign.write {
								s.end(c).Hold(nil)
							} else {
								say(p)
							}
						}
						r := <-ended
						require.Equal(t, float64(tt.ends), time.Since(missed).Minutes())
						require.Zero(t, r.n)
						require.ErrorIs(t, r.err, os.ErrDeadlineExceeded)
						require.ErrorIs(t, s.logged(), errTransferHeld)
						p.WaitEnd()
					})
				})
			}
		}
	}
}

// A peer that takes long over what was withdrawn, but is heard, keeps its connection.
func TestTransferPatienceSlowPeer(t *testing.T) {
	for _, side := range sides {
		for call, write := range map[string]bool{"write": true, "read": false} {
			t.Run(call+"/"+side.name, func(t *testing.T) {
				inVirtualTime(t, func(t *testing.T) {
					s, c, p, ended := heldCall(t, side.active, write, func(*scene, *Conn, *smbdpeer.Raw) {})
					for range 30 {
						time.Sleep(withdrawWithin / 10)
						say(p)
					}
					require.Empty(t, ended)
					if !write {
						p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Written, ID: 1, Length: heldRead}) // it claims
						require.Equal(t, result{heldRead, nil}, s.await(ended))
						return
					}
					p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Done, ID: 1})
					r := s.await(ended)
					require.Zero(t, r.n)
					require.ErrorIs(t, r.err, os.ErrDeadlineExceeded)
					c.SetWriteDeadline(time.Time{})
					_, err := c.Write([]byte("x"))
					require.NoError(t, err)
				})
			})
		}
	}
}
