package rdmanet

import (
	"bytes"
	"errors"
	"io"
	"math"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/regmem"
	"github.com/rdmanet/rdmanet/internal/smbdpeer"
)

// transferPeers are the ways in which a raw peer has data moved.
var transferPeers = []struct {
	name  string
	reads bool
}{{"read", true}, {"write", false}}

// transferPrivate is the private data of a peer that knows large transfers.
func transferPrivate(reads bool) []byte {
	p := smbdpeer.PrivateData{IRD: 4, ORD: 4, Rdmanet: true, Features: smbdpeer.FeatureFIN | smbdpeer.FeatureTransfer, MaxReceiveSize: 8136}
	if !reads {
		p.Features |= smbdpeer.FeatureNoRead
	}
	return p.Append(nil)
}

// eachTransferPeer runs f with a connection to a raw peer that knows large
// transfers, which are those of minTransfer bytes and more.
func eachTransferPeer(t *testing.T, f func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool)) {
	for _, m := range transferPeers {
		for _, side := range sides {
			t.Run(m.name+"/"+side.name, func(t *testing.T) {
				s := newScene(t)
				c, p := s.transferConns(side.active, m.reads)
				f(t, s, c, p, m.reads)
			})
		}
	}
}

// transferConns is a connection with a peer of the test's, which is asked for as much at a
// time as may be.
func (s *scene) transferConns(active, reads bool) (*Conn, *smbdpeer.Raw) {
	setPace(s.t, maxTransfers*fetchSize, time.Hour)
	s.cfg.TransferSize = minTransfer
	if s.cfg.LingerTimeout == 0 {
		s.cfg.LingerTimeout = -1
	}
	return s.conns(active, transferPrivate(reads))
}

func setWithdrawWithin(t testing.TB, d time.Duration) {
	old := withdrawWithin
	withdrawWithin = d
	t.Cleanup(func() { withdrawWithin = old })
}

// result is what a call on the connection came to.
type result struct {
	n   int
	err error
}

// writing is a Write of b under way.
func writing(c *Conn, b []byte) chan result {
	done := make(chan result, 1)
	go func() {
		n, err := c.Write(b)
		done <- result{n, err}
	}()
	return done
}

// reading is a Read of n bytes under way.
func reading(c *Conn, b []byte) chan result {
	done := make(chan result, 1)
	go func() {
		n, err := io.ReadFull(c, b)
		done <- result{n, err}
	}()
	return done
}

func (s *scene) await(ch chan result) result {
	s.t.Helper()
	select {
	case r := <-ch:
		return r
	case <-time.After(patience):
		require.FailNow(s.t, "the call hangs", stacks())
		return result{}
	}
}

// A peer that keeps to the rules is served, in both directions.
func TestTransferAtTheWire(t *testing.T) {
	eachTransferPeer(t, func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool) {
		const n = 100000
		for id := range uint32(3) {
			id++
			want := pattern(uint64(id), n)

			wrote := writing(c, want)
			h, first, ok := p.ReceiveTransfer()
			require.True(t, ok)
			require.Equal(t, id, h.ID)
			require.Zero(t, h.Rest)
			require.Equal(t, n, len(first)+int(h.Length))
			got := make([]byte, h.Length)
			if reads {
				require.Equal(t, smbdpeer.Offer, h.Kind)
				require.Equal(t, ibv.WCSuccess, p.RDMA(ibv.OpRead, got, h.Addr, h.Key))
				p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Done, ID: id, Length: h.Length})
			} else {
				require.Equal(t, smbdpeer.Request, h.Kind)
				addr, key := p.Register(got)
				half := h.Length / 2
				p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Grant, ID: id, Addr: addr, Key: key, Length: half})
				p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Grant, ID: id, Addr: addr + uint64(half), Key: key, Length: h.Length - half})
				for _, l := range []uint32{half, h.Length - half} {
					require.Equal(t, smbdpeer.Transfer{Kind: smbdpeer.Written, ID: id, Length: l}, p.ExpectTransfer(smbdpeer.Written))
				}
			}
			require.Equal(t, result{n, nil}, s.await(wrote))
			require.True(t, bytes.Equal(want, append(first, got...)))

			b := make([]byte, n)
			read := reading(c, b)
			addr, key := p.Register(want)
			p.Begin(reads, id, n, addr, key)
			if reads {
				require.Equal(t, smbdpeer.Transfer{Kind: smbdpeer.Done, ID: id, Length: n}, p.ExpectTransfer(smbdpeer.Done))
			} else {
				g := p.ExpectTransfer(smbdpeer.Grant)
				require.Equal(t, id, g.ID)
				require.EqualValues(t, n, g.Length)
				require.Equal(t, ibv.WCSuccess, p.RDMA(ibv.OpWrite, want, g.Addr, g.Key))
				p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Written, ID: id, Length: n})
			}
			require.Equal(t, result{n, nil}, s.await(read))
			require.True(t, bytes.Equal(want, b))
		}
		require.NoError(t, c.Close())
	})
}

// bogus is a key of nobody's, or hardly of anybody's.
const bogus = 0x7f7f7f01

// What a peer must not say of transfers ends the connection, with an error that
// says what it was.
func TestTransferBreaches(t *testing.T) {
	const n = 2 << 20 // more than is read ahead, with the rest below
	cut := func(b []byte, n int) []byte { return b[:n] }
	say := func(p *smbdpeer.Raw, b []byte) {
		p.WaitCredit()
		p.Credits--
		p.Send(b)
	}
	with := func(h smbdpeer.DataTransfer, t smbdpeer.Transfer, size int) []byte {
		h.Flags |= smbdpeer.FlagTransfer
		b := h.Message(size)
		copy(b[smbdpeer.PayloadOffset:], t.Append(nil))
		return b
	}
	type breach struct {
		name   string
		only   int // 1: where data is read, 2: where it is written
		want   error
		do     func(p *smbdpeer.Raw, reads bool)
		writes bool // the connection under test has a Write under way, whose offer was heard
		reads  bool // and a Read
	}
	h := smbdpeer.DataTransfer{CreditsRequested: 16, CreditsGranted: 1}
	told := func(kind smbdpeer.TransferKind, id, length uint32) func(p *smbdpeer.Raw, reads bool) {
		return func(p *smbdpeer.Raw, reads bool) {
			p.SendTransfer(smbdpeer.Transfer{Kind: kind, ID: id, Length: length})
		}
	}
	starts := func(p *smbdpeer.Raw, reads bool, id uint32, n int) {
		addr, key := uint64(0), uint32(0)
		if reads {
			addr, key = p.Register(make([]byte, n))
		}
		p.Begin(reads, id, n, addr, key)
	}
	breaches := []breach{
		{name: "a header and no transfer header", want: errTransferHeader, do: func(p *smbdpeer.Raw, reads bool) {
			h.Flags |= smbdpeer.FlagTransfer
			say(p, h.Message(smbdpeer.HeaderLen))
		}},
		{name: "one byte short", want: errTransferHeader, do: func(p *smbdpeer.Raw, reads bool) {
			say(p, cut(smbdpeer.Transfer{Kind: smbdpeer.Done}.Message(nil), smbdpeer.TransferPayloadOffset-1))
		}},
		{name: "payload at the place of the header", want: errTransferHeader, do: func(p *smbdpeer.Raw, reads bool) {
			say(p, with(smbdpeer.DataTransfer{CreditsRequested: 1, DataOffset: smbdpeer.PayloadOffset, DataLength: 40}, smbdpeer.Transfer{Kind: smbdpeer.Offer, ID: 1, Length: 1}, 100))
		}},
		{name: "kind 0", want: errTransferKind, do: told(0, 1, 1)},
		{name: "kind 7", want: errTransferKind, do: told(7, 1, 1)},
		{name: "a request where data is read", only: 1, want: errTransferKind, do: told(smbdpeer.Request, 1, 1)},
		{name: "a grant where data is read", only: 1, want: errTransferKind, do: told(smbdpeer.Grant, 1, 1)},
		{name: "a grant for an offer", only: 1, want: errTransferKind, writes: true, do: told(smbdpeer.Grant, 1, 1)},
		{name: "written where data is read", only: 1, want: errTransferKind, do: told(smbdpeer.Written, 1, 1)},
		{name: "an offer where data is written", only: 2, want: errTransferKind, do: told(smbdpeer.Offer, 1, 1)},
		{name: "a withdrawal where data is written", only: 2, want: errTransferKind, do: told(smbdpeer.Withdraw, 1, 0)},
		{name: "done with payload", want: errTransferKind, do: func(p *smbdpeer.Raw, reads bool) {
			say(p, smbdpeer.Transfer{Kind: smbdpeer.Done, ID: 1}.Message(make([]byte, 10)))
		}},

		{name: "the first is number 0", want: errTransferID, do: func(p *smbdpeer.Raw, reads bool) { starts(p, reads, 0, 10) }},
		{name: "the first is number 2", want: errTransferID, do: func(p *smbdpeer.Raw, reads bool) { starts(p, reads, 2, 10) }},
		{name: "twice the same number", want: errTransferID, do: func(p *smbdpeer.Raw, reads bool) { starts(p, reads, 1, n); starts(p, reads, 1, n) }},
		{name: "a number left out", want: errTransferID, do: func(p *smbdpeer.Raw, reads bool) { starts(p, reads, 1, n); starts(p, reads, 3, n) }},
		{name: "nothing offered", want: errTransferLength, do: func(p *smbdpeer.Raw, reads bool) { p.Begin(reads, 1, 0, 0, bogus) }},
		{name: "one byte too long", want: errTransferLength, do: func(p *smbdpeer.Raw, reads bool) { p.Begin(reads, 1, transferCeiling+1, 0, bogus) }},
		{name: "4 GiB less one", want: errTransferLength, do: func(p *smbdpeer.Raw, reads bool) { p.Begin(reads, 1, -1, 0, bogus) }},
		{name: "a message of 2^64 bytes", want: errTransferLength, do: func(p *smbdpeer.Raw, reads bool) {
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Offer, ID: 1, Length: 1, Rest: math.MaxUint64})
		}},
		{name: "a remainder", want: errTransferLength, do: func(p *smbdpeer.Raw, reads bool) {
			say(p, with(smbdpeer.DataTransfer{CreditsRequested: 1, RemainingDataLength: 1}, smbdpeer.Transfer{Kind: smbdpeer.Offer, ID: 1, Length: 1}, smbdpeer.TransferPayloadOffset))
		}},
		{name: "too many", want: errTransferCount, do: func(p *smbdpeer.Raw, reads bool) {
			addr, key := p.Register(make([]byte, n))
			for id := range uint32(maxTransfers + 1) {
				p.Begin(reads, id+1, n, addr, key)
			}
		}},
		{name: "inside a message of segments", want: errTransferRest, do: func(p *smbdpeer.Raw, reads bool) {
			say(p, smbdpeer.Segment(10, 100))
			starts(p, reads, 1, 100)
		}},
		{name: "a segment inside a message of transfers", want: errTransferRest, do: func(p *smbdpeer.Raw, reads bool) {
			beginWithRest(p, reads, n, 10)
			say(p, smbdpeer.Segment(10, 0))
		}},
		{name: "less than the rest", want: errTransferRest, do: func(p *smbdpeer.Raw, reads bool) {
			beginWithRest(p, reads, n, 11)
			starts(p, reads, 2, 10)
		}},
		{name: "more than the rest", want: errTransferRest, do: func(p *smbdpeer.Raw, reads bool) {
			beginWithRest(p, reads, n, 9)
			starts(p, reads, 2, 10)
		}},
		{name: "FIN inside a message of transfers", want: errFINInMessage, do: func(p *smbdpeer.Raw, reads bool) {
			beginWithRest(p, reads, n, 10)
			say(p, smbdpeer.DataTransfer{CreditsRequested: 16, Flags: smbdpeer.FlagFIN}.Message(smbdpeer.HeaderLen))
		}},
		{name: "FIN with it", want: errFINInMessage, do: func(p *smbdpeer.Raw, reads bool) {
			kind := smbdpeer.Request
			if reads {
				kind = smbdpeer.Offer
			}
			say(p, with(smbdpeer.DataTransfer{CreditsRequested: 16, Flags: smbdpeer.FlagFIN}, smbdpeer.Transfer{Kind: kind, ID: 1, Length: n}, smbdpeer.TransferPayloadOffset))
		}},
		{name: "after FIN", want: errDataAfterFIN, do: func(p *smbdpeer.Raw, reads bool) {
			say(p, smbdpeer.DataTransfer{CreditsRequested: 16, CreditsGranted: 1, Flags: smbdpeer.FlagFIN}.Message(smbdpeer.HeaderLen))
			starts(p, reads, 1, 10)
		}},

		{name: "withdrawn before it began", want: errTransferID, do: func(p *smbdpeer.Raw, reads bool) { p.WithdrawTransfer(reads, 1, 0) }},
		{name: "withdrawn with number 0", want: errTransferID, do: func(p *smbdpeer.Raw, reads bool) { starts(p, reads, 1, n); p.WithdrawTransfer(reads, 0, 0) }},
		{name: "the next one withdrawn", want: errTransferID, do: func(p *smbdpeer.Raw, reads bool) { starts(p, reads, 1, n); p.WithdrawTransfer(reads, 2, 0) }},
		{name: "the first of two withdrawn", want: errTransferID, do: func(p *smbdpeer.Raw, reads bool) {
			starts(p, reads, 1, n)
			starts(p, reads, 2, n)
			p.WithdrawTransfer(reads, 1, 0)
		}},
		{name: "the second of two withdrawn", want: errTransferID, do: func(p *smbdpeer.Raw, reads bool) {
			starts(p, reads, 1, n)
			starts(p, reads, 2, n)
			p.WithdrawTransfer(reads, 2, 0)
		}},
		{name: "withdrawn with a length", only: 2, want: errTransferLength, do: func(p *smbdpeer.Raw, reads bool) {
			starts(p, reads, 1, n)
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Written, Flags: smbdpeer.TransferEnd, ID: 1, Length: 1})
		}},
		{name: "written and nothing requested", only: 2, want: errTransferCount, do: told(smbdpeer.Written, 1, 1)},
		{name: "written to the wrong one", only: 2, want: errTransferLength, reads: true, do: func(p *smbdpeer.Raw, reads bool) {
			p.Begin(reads, 1, n, 0, 0)
			g := p.ExpectTransfer(smbdpeer.Grant)
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Written, ID: 2, Length: g.Length})
		}},
		{name: "less written than granted", only: 2, want: errTransferLength, reads: true, do: func(p *smbdpeer.Raw, reads bool) {
			p.Begin(reads, 1, n, 0, 0)
			g := p.ExpectTransfer(smbdpeer.Grant)
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Written, ID: 1, Length: g.Length - 1})
		}},
		{name: "more written than granted", only: 2, want: errTransferLength, reads: true, do: func(p *smbdpeer.Raw, reads bool) {
			p.Begin(reads, 1, n, 0, 0)
			g := p.ExpectTransfer(smbdpeer.Grant)
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Written, ID: 1, Length: g.Length + 1})
		}},
		{name: "written oftener than granted", only: 2, want: errTransferCount, reads: true, do: func(p *smbdpeer.Raw, reads bool) {
			p.Begin(reads, 1, n, 0, 0)
			g := p.ExpectTransfer(smbdpeer.Grant)
			for range n/g.Length + 1 { // the next piece may be granted as soon as one is written
				p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Written, ID: 1, Length: g.Length})
			}
		}},

		{name: "done and nothing offered", want: errTransferID, do: told(smbdpeer.Done, 1, 0)},
		{name: "done with number 0", want: errTransferID, writes: true, do: told(smbdpeer.Done, 0, 0)},
		{name: "the next one done", want: errTransferID, writes: true, do: told(smbdpeer.Done, 2, 0)},
		{name: "less done than offered", want: errTransferLength, writes: true, do: told(smbdpeer.Done, 1, 1)},
		{name: "nothing done", want: errTransferLength, writes: true, do: told(smbdpeer.Done, 1, 0)},
		{name: "more done than offered", want: errTransferLength, writes: true, do: told(smbdpeer.Done, 1, 1<<30)},
		{name: "4 GiB done", want: errTransferLength, writes: true, do: told(smbdpeer.Done, 1, math.MaxUint32)},
		{name: "done twice", only: 1, want: errTransferID, writes: true, do: func(p *smbdpeer.Raw, reads bool) {
			for range 2 {
				p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Done, ID: 1, Length: breachWrite})
			}
		}},
		{name: "a grant and nothing requested", only: 2, want: errTransferID, do: told(smbdpeer.Grant, 1, 1)},
		{name: "a grant of number 0", only: 2, want: errTransferID, writes: true, do: told(smbdpeer.Grant, 0, 1)},
		{name: "a grant of the next one", only: 2, want: errTransferID, writes: true, do: told(smbdpeer.Grant, 2, 1)},
		{name: "a grant of nothing", only: 2, want: errTransferLength, writes: true, do: told(smbdpeer.Grant, 1, 0)},
		{name: "a grant beyond the length", only: 2, want: errTransferLength, writes: true, do: told(smbdpeer.Grant, 1, breachWrite+1)},
		{name: "a grant of 4 GiB", only: 2, want: errTransferLength, writes: true, do: told(smbdpeer.Grant, 1, math.MaxUint32)},
		{name: "grants that add up to more", only: 2, want: errTransferLength, writes: true, do: func(p *smbdpeer.Raw, reads bool) {
			addr, key := p.Register(make([]byte, breachWrite))
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Grant, ID: 1, Addr: addr, Key: key, Length: 10})
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Grant, ID: 1, Addr: addr, Key: key, Length: breachWrite - 9})
		}},
	}
	for _, b := range breaches {
		t.Run(b.name, func(t *testing.T) {
			eachTransferPeer(t, func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool) {
				if b.only == 1 && !reads || b.only == 2 && reads {
					return
				}
				var wrote, read chan result
				if b.writes {
					buf := alloc(t, breachWrite) // nothing of it goes along
					wrote = writing(c, buf.Bytes())
					require.EqualValues(t, breachWrite, p.ExpectBegin(reads).Length)
				}
				if b.reads {
					read = reading(c, make([]byte, n))
				}
				b.do(p, reads)
				p.WaitEnd()
				requireCause(t, s.logged(), b.want)
				for _, ch := range []chan result{wrote, read} {
					if ch == nil {
						continue
					}
					if r := s.await(ch); r.err != nil { // else it was done before the breach
						requireCause(t, r.err, b.want)
					}
				}
				_, err := io.Copy(io.Discard, c)
				if b.want != errDataAfterFIN {
					requireCause(t, err, b.want)
					require.ErrorIs(t, err, syscall.ECONNRESET)
				}
				_, err = c.Write(make([]byte, breachWrite))
				requireCause(t, err, b.want)
				require.NoError(t, c.Close())
				require.Empty(t, s.errs, "one error, once")
				s.exchange(s.listen())
			})
		})
	}
}

const breachWrite = 64 << 10

// beginWithRest begins transfer 1, of n bytes, in a message that has rest more.
func beginWithRest(p *smbdpeer.Raw, reads bool, n, rest int) {
	h := smbdpeer.Transfer{Kind: smbdpeer.Request, ID: 1, Length: uint32(n), Rest: uint64(rest)}
	if reads {
		h.Kind = smbdpeer.Offer
		h.Addr, h.Key = p.Register(make([]byte, n))
	}
	p.SendTransfer(h)
}

// Grants that are not answered yet are bounded.
func TestTooManyGrants(t *testing.T) {
	c := &conn{}
	c.tx.mode = transferWrite
	for id := range uint32(2) {
		c.tx.last++
		c.tx.live.Push(&sendTransfer{id: id + 1, p: make([]byte, 2*maxTransfers)})
	}
	require.Equal(t, errTransferID, c.granted(&transferHeader{ID: 2, Length: 1}), "the first one has its turn")
	for range maxTransfers {
		require.NoError(t, c.granted(&transferHeader{ID: 1, Length: 1}))
	}
	require.Equal(t, errTransferCount, c.granted(&transferHeader{ID: 1, Length: 1}))
	for range maxTransfers / 2 {
		c.tx.grants.Pop()
	}
	require.NoError(t, c.granted(&transferHeader{ID: 1, Length: maxTransfers}))
	require.NoError(t, c.granted(&transferHeader{ID: 2, Length: 1}))
}

// Where transfers were not agreed on, the flag means nothing.
func TestTransferNotAgreed(t *testing.T) {
	for _, side := range sides {
		for name, private := range map[string][]byte{"plain": nil, "rdmanet": rdmanetPrivate} {
			t.Run(side.name+"/"+name, func(t *testing.T) {
				s := newScene(t)
				c, p := s.conns(side.active, private)
				for _, kind := range []smbdpeer.TransferKind{smbdpeer.Offer, smbdpeer.Request, smbdpeer.Grant, smbdpeer.Written, smbdpeer.Done, smbdpeer.Withdraw, 7} {
					p.SendTransfer(smbdpeer.Transfer{Kind: kind, ID: 1, Addr: 1, Key: bogus, Length: 1 << 20})
				}
				p.WaitCredit()
				p.Credits--
				b := smbdpeer.Segment(10, 0)
				b[5] |= byte(smbdpeer.FlagTransfer >> 8)
				p.Send(b)
				got := make([]byte, 10)
				_, err := io.ReadFull(c, got)
				require.NoError(t, err)
				require.Equal(t, b[smbdpeer.PayloadOffset:], got)
				require.Zero(t, c.Stats().TransfersReceived)

				wrote := writing(c, alloc(t, 20000).Bytes())
				for n := 0; n < 20000; {
					h, payload, ok := p.ReceiveData()
					require.True(t, ok)
					require.Zero(t, h.Flags&smbdpeer.FlagTransfer)
					n += len(payload)
					p.WaitCredit()
					p.Grant(2)
				}
				require.Equal(t, result{20000, nil}, s.await(wrote))
			})
		}
	}
}

// An offer, or a grant, whose memory the device cannot use ends the connection
// that takes it up, and leaves the others alone.
func TestTransferBogusKey(t *testing.T) {
	eachTransferPeer(t, func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool) {
		ln := s.listen()
		var call chan result
		if reads {
			call = reading(c, make([]byte, 100000))
			p.Begin(true, 1, 100000, 4096, bogus)
		} else {
			call = writing(c, alloc(t, breachWrite).Bytes())
			p.ExpectBegin(false)
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Grant, ID: 1, Addr: 4096, Key: bogus, Length: breachWrite})
		}
		if reads || !overIWARP(t) {
			r := s.await(call)
			require.ErrorIs(t, r.err, syscall.ECONNRESET)
			require.Zero(t, r.n)
		} else if r := s.await(call); r.err != nil { // a Write of iWARP's is over when it is sent
			require.ErrorIs(t, r.err, syscall.ECONNRESET)
		}
		_, err := c.Read(make([]byte, 1))
		require.Error(t, err)
		p.WaitEnd()
		require.NoError(t, c.Close())
		s.exchange(ln)
	})
}

// A peer that never takes what it is offered: the deadline ends the Write, and
// as the peer does not let go of the memory either, the connection.
func TestTransferNeverTaken(t *testing.T) {
	setWithdrawWithin(t, 100*time.Millisecond)
	eachTransferPeer(t, func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool) {
		buf := alloc(t, breachWrite)
		wrote := writing(c, buf.Bytes())
		h := p.ExpectBegin(reads)
		c.SetWriteDeadline(time.Now())
		if reads {
			require.Equal(t, smbdpeer.Transfer{Kind: smbdpeer.Withdraw, ID: 1}, p.ExpectTransfer(smbdpeer.Withdraw))
		} else {
			require.Equal(t, smbdpeer.Transfer{Kind: smbdpeer.Written, Flags: smbdpeer.TransferEnd, ID: 1}, p.ExpectTransfer(smbdpeer.Written))
		}
		r := s.await(wrote)
		require.ErrorIs(t, r.err, os.ErrDeadlineExceeded)
		require.Zero(t, r.n)
		st := c.Stats()
		require.Zero(t, st.TransferBytesSent)
		require.Zero(t, st.BytesSent)
		c.SetWriteDeadline(time.Now().Add(patience))
		if !reads { // it was this side that would have moved it
			wrote := writing(c, buf.Bytes())
			require.EqualValues(t, 2, p.ExpectBegin(reads).ID)
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Grant, ID: 1, Addr: 1, Key: bogus, Length: 10}) // it crossed
			addr, key := p.Register(make([]byte, breachWrite))
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Grant, ID: 2, Addr: addr, Key: key, Length: breachWrite})
			require.Equal(t, result{breachWrite, nil}, s.await(wrote))
			return
		}
		require.ErrorIs(t, s.logged(), errTransferHeld)
		_, err := c.Write([]byte("x"))
		require.ErrorIs(t, err, errTransferHeld)
		_, err = c.Read(make([]byte, 1))
		require.ErrorIs(t, err, syscall.ETIMEDOUT)
		p.WaitEnd()
		require.NotZero(t, h.Key)
		require.NoError(t, c.Close())
		mem := buf.Bytes()
		buf.Free()
		require.Nil(t, regmem.Find(mem), "it is given back")
	})
}

// A transfer that the peer has taken in part when it is given up counts so far.
func TestTransferTakenInPart(t *testing.T) {
	eachTransferPeer(t, func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool) {
		buf := alloc(t, breachWrite)
		copy(buf.Bytes(), pattern(1, breachWrite))
		wrote := writing(c, buf.Bytes())
		h := p.ExpectBegin(reads)
		got := make([]byte, 1000)
		if reads {
			require.Equal(t, ibv.WCSuccess, p.RDMA(ibv.OpRead, got, h.Addr, h.Key))
		} else {
			addr, key := p.Register(got)
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Grant, ID: 1, Addr: addr, Key: key, Length: 1000})
			p.ExpectTransfer(smbdpeer.Written)
			require.True(t, eventually(func() bool {
				c.mu.Lock()
				defer c.unlock()
				c.poll()
				return (*c.tx.live.At(0)).moved == 1000
			}))
		}
		c.SetWriteDeadline(time.Unix(1, 0))
		if reads {
			p.ExpectTransfer(smbdpeer.Withdraw)
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Done, ID: 1, Length: 1000})
		}
		r := s.await(wrote)
		require.ErrorIs(t, r.err, os.ErrDeadlineExceeded)
		require.Equal(t, 1000, r.n)
		require.Equal(t, pattern(1, breachWrite)[:1000], got)
		st := c.Stats()
		require.EqualValues(t, 1000, st.TransferBytesSent)
		require.EqualValues(t, 1000, st.BytesSent)

		// The stream goes on from there.
		c.SetWriteDeadline(time.Now().Add(patience))
		_, err := c.Write([]byte("onwards"))
		require.NoError(t, err)
		for {
			_, payload, ok := p.ReceiveData()
			require.True(t, ok)
			if len(payload) > 0 {
				require.Equal(t, "onwards", string(payload))
				break
			}
		}
	})
}

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
func TestTransferMessageCut(t *testing.T) {
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

// A message of more than one transfer, of which the first was withdrawn as a whole,
// has never been: what is sent next is not in the middle of it.
func TestTransferMessageNeverBegun(t *testing.T) {
	if onRDMA {
		return // a GiB would have to be pinned
	}
	s := newScene(t)
	c, p := s.transferConns(true, true)
	long := alloc(t, transferCeiling+minTransfer).Bytes()
	cut := make(chan error, 1)
	go func() { cut <- c.WriteMsg(long) }()
	p.ExpectBegin(true)
	require.NoError(t, c.SetWriteDeadline(past))
	h := p.ExpectTransfer(smbdpeer.Withdraw)
	p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Done, ID: h.ID})
	requireTimeout(t, <-cut)
	requireTimeout(t, c.WriteMsg([]byte("late")))
	require.NoError(t, c.SetWriteDeadline(time.Time{}))
	require.NoError(t, c.WriteMsg([]byte("message")))
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

// The connection is cut at every step: each call ends with an error, and nothing
// is left.
func TestTransferCut(t *testing.T) {
	const n = 1 << 20
	leave := map[string]func(p *smbdpeer.Raw){
		"disconnects": func(p *smbdpeer.Raw) { p.ID.Disconnect() },
		"drops":       func(p *smbdpeer.Raw) { p.Close() },
	}
	steps := []struct {
		name   string
		only   int // as in TestTransferBreaches
		writes bool
		small  bool // the reader takes little at a time
		idle   bool // there is none
		do     func(p *smbdpeer.Raw, c *Conn, reads bool)
	}{
		{name: "offered", writes: true, do: func(p *smbdpeer.Raw, c *Conn, reads bool) { p.ExpectBegin(reads) }},
		{name: "fetched", only: 1, writes: true, do: func(p *smbdpeer.Raw, c *Conn, reads bool) {
			h := p.ExpectBegin(reads)
			p.RDMA(ibv.OpRead, make([]byte, 1000), h.Addr, h.Key)
		}},
		{name: "granted", only: 2, writes: true, do: func(p *smbdpeer.Raw, c *Conn, reads bool) {
			p.ExpectBegin(reads)
			addr, key := p.Register(make([]byte, n))
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Grant, ID: 1, Addr: addr, Key: key, Length: n / 2})
		}},
		{name: "written", only: 2, writes: true, do: func(p *smbdpeer.Raw, c *Conn, reads bool) {
			p.ExpectBegin(reads)
			addr, key := p.Register(make([]byte, n))
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Grant, ID: 1, Addr: addr, Key: key, Length: n / 2})
			p.ExpectTransfer(smbdpeer.Written)
		}},
		{name: "withdrawn", writes: true, do: func(p *smbdpeer.Raw, c *Conn, reads bool) {
			p.ExpectBegin(reads)
			c.SetWriteDeadline(time.Unix(1, 0))
			p.ReceiveTransfer()
		}},
		{name: "begun, for a large Read", do: func(p *smbdpeer.Raw, c *Conn, reads bool) { p.BeginFirst(reads, n) }},
		{name: "begun, for a small Read", small: true, do: func(p *smbdpeer.Raw, c *Conn, reads bool) { p.BeginFirst(reads, n) }},
		{name: "begun, for nobody", idle: true, do: func(p *smbdpeer.Raw, c *Conn, reads bool) { p.BeginFirst(reads, n) }},
		{name: "grant heard", only: 2, do: func(p *smbdpeer.Raw, c *Conn, reads bool) {
			p.BeginFirst(reads, n)
			p.ExpectTransfer(smbdpeer.Grant)
		}},
		{name: "grant for a small Read heard", only: 2, small: true, do: func(p *smbdpeer.Raw, c *Conn, reads bool) {
			p.BeginFirst(reads, n)
			p.ExpectTransfer(smbdpeer.Grant)
		}},
		{name: "grant for nobody heard", only: 2, idle: true, do: func(p *smbdpeer.Raw, c *Conn, reads bool) {
			p.BeginFirst(reads, n)
			p.ExpectTransfer(smbdpeer.Grant)
		}},
		{name: "grant used", only: 2, do: func(p *smbdpeer.Raw, c *Conn, reads bool) {
			p.BeginFirst(reads, n)
			h := p.ExpectTransfer(smbdpeer.Grant)
			p.RDMA(ibv.OpWrite, make([]byte, 1000), h.Addr, h.Key)
		}},
		{name: "grant of a small Read answered", only: 2, small: true, do: func(p *smbdpeer.Raw, c *Conn, reads bool) {
			p.BeginFirst(reads, n)
			h := p.ExpectTransfer(smbdpeer.Grant)
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Written, ID: 1, Length: h.Length})
		}},
		{name: "withdrawn by the peer", do: func(p *smbdpeer.Raw, c *Conn, reads bool) {
			p.BeginFirst(reads, n)
			p.WithdrawTransfer(reads, 1, 0)
		}},
	}
	for _, step := range steps {
		for how, quit := range leave {
			t.Run(step.name+"/"+how, func(t *testing.T) {
				eachTransferPeer(t, func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool) {
					if step.only == 1 && !reads || step.only == 2 && reads {
						return
					}
					var call chan result
					switch {
					case step.writes:
						call = writing(c, alloc(t, n).Bytes())
					case step.small:
						call = make(chan result, 1)
						go func() {
							_, err := io.CopyBuffer(io.Discard, struct{ io.Reader }{c}, make([]byte, 100))
							call <- result{err: err}
						}()
					case !step.idle:
						call = reading(c, make([]byte, 2*n))
					}
					step.do(p, c, reads)
					quit(p)
					if call != nil {
						r := s.await(call)
						require.Error(t, r.err)
						var op *net.OpError
						require.True(t, errors.As(r.err, &op) || r.err == io.ErrUnexpectedEOF, "%v", r.err)
						require.Less(t, r.n, 2*n)
					}
					c.SetDeadline(time.Now().Add(patience))
					_, err := io.Copy(io.Discard, c)
					require.Error(t, err, "the stream has no end")
					require.False(t, errors.Is(err, os.ErrDeadlineExceeded), "%v", err)
					_, err = c.Write(make([]byte, breachWrite))
					require.Error(t, err)
					within(t, "Close", func() { c.Close() })
				})
			})
		}
	}
}

// What fails, or is withdrawn, after nobody wants it any more is given back, too.
func TestTransferDroppedUnderway(t *testing.T) {
	eachTransferPeer(t, func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool) {
		c.rx.reading++ // somebody is about to read, so nothing is fetched ahead
		p.Begin(reads, 1, 1<<20, 4096, bogus)
		require.True(t, eventually(func() bool { return c.Stats().TransfersReceived == 1 }))
		c.mu.Lock()
		c.readAhead()
		require.NotZero(t, c.rx.inFlight.Len())
		c.in.discarding = true
		c.dropUnread()
		c.unlock()
		if !reads {
			p.WithdrawTransfer(false, 1, 0)
		}
		require.True(t, eventually(func() bool {
			c.mu.Lock()
			defer c.unlock()
			return c.rx.bounceBuffers == 0
		}))
		require.NoError(t, c.Close())
	})
}

// CloseRead, Close and deadlines end what waits for a peer that moves nothing.
func TestTransferNothingMoves(t *testing.T) {
	setWithdrawWithin(t, 100*time.Millisecond)
	const n = 1 << 20
	for name, end := range map[string]func(c *Conn) error{
		"CloseRead": (*Conn).CloseRead,
		"Close":     (*Conn).Close,
		"deadline":  func(c *Conn) error { return c.SetReadDeadline(time.Unix(1, 0)) },
	} {
		for _, size := range []int{10, n} {
			t.Run(name, func(t *testing.T) {
				s := newScene(t)
				c, p := s.transferConns(false, false)
				read := reading(c, make([]byte, size))
				p.BeginFirst(false, n)
				p.ExpectTransfer(smbdpeer.Grant)
				within(t, name, func() { require.NoError(t, end(c)) })
				r := s.await(read)
				require.Zero(t, r.n)
				switch name {
				case "CloseRead":
					require.Equal(t, io.EOF, r.err)
				case "Close":
					require.ErrorIs(t, r.err, net.ErrClosed)
				default:
					require.ErrorIs(t, r.err, os.ErrDeadlineExceeded)
				}
			})
		}
	}
}

// A peer that begins transfers and takes them back again and again fills no memory
// while nobody reads: what has never been is not kept for the reader.
func TestTransferWithdrawnLeavesNothing(t *testing.T) {
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
func TestTransferWithdrawnNeglected(t *testing.T) {
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
func TestTransferWithdrawnUnderReadMsg(t *testing.T) {
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

// plain is a result without the operation in its error.
func plain(r result) result {
	var op *net.OpError
	if errors.As(r.err, &op) {
		r.err = op.Err
	}
	return r
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
func TestTransferWithdrawnEnd(t *testing.T) {
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

// awaitReader waits until a call reads.
func (c *conn) awaitReader(t testing.TB) {
	t.Helper()
	require.True(t, eventually(func() bool {
		c.mu.Lock()
		defer c.unlock()
		return c.rx.reading > 0
	}))
}

// filling is what a large Read is under way to.
func (c *conn) filling() *directRead {
	c.mu.Lock()
	defer c.unlock()
	return (*c.rx.inFlight.At(0)).into
}

// setReadDeadline sets it and waits until the call that fills into has heard of it.
func (c *conn) setReadDeadline(t testing.TB, into *directRead, at time.Time) {
	t.Helper()
	require.NoError(t, c.SetReadDeadline(at))
	require.True(t, eventually(func() bool {
		c.mu.Lock()
		defer c.unlock()
		c.wakeAll() // a later deadline wakes nobody
		return (into.late != nil) == (at == past)
	}))
}

// A deadline that passes in the middle of a large Read and is moved before the peer
// has let go of the memory ends nothing. The next one does.
func TestTransferDeadlineMoved(t *testing.T) {
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			setWithdrawWithin(t, time.Hour)
			s := newScene(t)
			c, p := s.transferConns(side.active, false)
			const n = 1 << 20
			b := make([]byte, 2*n)
			read := reading(c, b[:n])
			c.awaitReader(t)
			p.Begin(false, 1, n, 0, 0)
			g := p.ExpectTransfer(smbdpeer.Grant)
			into := c.filling()
			c.setReadDeadline(t, into, past)
			c.setReadDeadline(t, into, time.Now().Add(patience))
			c.abandonDirect(into) // the time for the first one is over
			p.Answer(g, make([]byte, g.Length))
			require.Equal(t, result{n, nil}, s.await(read))

			read = reading(c, b)
			c.awaitReader(t)
			p.Begin(false, 2, n, 0, 0)
			p.ExpectTransfer(smbdpeer.Grant)
			into = c.filling()
			c.setReadDeadline(t, into, past)
			c.setReadDeadline(t, into, time.Now().Add(patience))
			c.mu.Lock()
			setWithdrawWithin(t, time.Millisecond)
			c.unlock()
			c.SetReadDeadline(past)
			r := s.await(read)
			require.Zero(t, r.n)
			require.ErrorIs(t, r.err, os.ErrDeadlineExceeded)
			require.ErrorIs(t, s.logged(), errTransferHeld)
		})
	}
}

// A large Write that steps aside for the beginning of an expedited message, and then
// misses its deadline, leaves it begun: no other message gets inside.
func TestTransferStepsAsideAndFails(t *testing.T) {
	for _, m := range transferPeers {
		for _, side := range sides {
			t.Run(m.name+"/"+side.name, func(t *testing.T) {
				s := newScene(t)
				s.cfg.TransferSize, s.cfg.LingerTimeout = minTransfer, -1
				private := smbdpeer.ParsePrivateData(transferPrivate(m.reads))
				private.Features |= smbdpeer.FeatureMessages
				c, p := s.conns(side.active, private.Append(nil))

				_, err := c.ReadFrom(bytes.NewReader(make([]byte, regmem.ChunkSize)))
				require.NoError(t, err)
				p.ExpectBegin(m.reads) // and nobody takes it, so the next one has to wait
				wrote := writing(c, alloc(t, breachWrite).Bytes())
				require.True(t, eventually(func() bool {
					c.mu.Lock()
					defer c.unlock()
					return c.queue.busy && (c.writers.Waiting() > 0 || c.wait.Leading())
				}))
				_, err = c.SendMsg([]byte("ur"), Expedited|Partial)
				require.NoError(t, err)
				require.NoError(t, c.SetWriteDeadline(past))
				r := s.await(wrote)
				require.Zero(t, r.n)
				requireTimeout(t, r.err)
				require.NoError(t, c.SetWriteDeadline(time.Now().Add(patience)))
				_, err = c.SendMsg([]byte("later"), NonBlocking)
				require.ErrorIs(t, err, syscall.EAGAIN, "it is inside the other one")
				_, err = c.SendMsg([]byte("gent"), Expedited)
				require.NoError(t, err)
				_, err = c.SendMsg([]byte("later"), 0)
				require.NoError(t, err)
				var got []string
				for len(got) < 3 {
					_, payload, ok := p.ReceiveData()
					require.True(t, ok)
					if len(payload) > 0 {
						got = append(got, string(payload))
					}
				}
				require.Equal(t, []string{"ur", "gent", "later"}, got)
			})
		}
	}
}

// Fields that a kind of transfer header does not name are not looked at: an empty
// message that comes with such a header has no length.
func TestTransferHeaderOnEmptyMessage(t *testing.T) {
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			s := newScene(t)
			private := smbdpeer.ParsePrivateData(transferPrivate(true))
			private.Features |= smbdpeer.FeatureMessages
			c, p := s.conns(side.active, private.Append(nil))
			b := make([]byte, 10)
			read := reading(c, b)
			addr, key := p.Register(make([]byte, 10))
			p.Begin(true, 1, 10, addr, key)
			require.Equal(t, result{10, nil}, s.await(read))
			p.ExpectTransfer(smbdpeer.Done)
			w := smbdpeer.Transfer{Kind: smbdpeer.Withdraw, ID: 1, Length: 1 << 29, Rest: 1 << 30}.Message(nil)
			w[5] |= byte(smbdpeer.FlagEmptyMessage >> 8)
			p.WaitCredit()
			p.Credits--
			p.Send(w)
			n, err := c.ReadMsg(b)
			require.NoError(t, err)
			require.Zero(t, n)
		})
	}
}

// What nobody reads is fetched as far as scratch goes, however few RDMA Reads may be
// under way.
func TestTransferNeglected(t *testing.T) {
	s := newScene(t)
	s.cfg.TransferSize, s.cfg.LingerTimeout = minTransfer, -1
	c, p := s.conns(true, smbdpeer.PrivateData{IRD: 2, ORD: 2, Rdmanet: true, Features: smbdpeer.FeatureFIN | smbdpeer.FeatureTransfer, MaxReceiveSize: 8136}.Append(nil))
	p.BeginFirst(true, 2*maxBounceBuffers*regmem.ChunkSize)
	require.True(t, eventually(func() bool { return c.Stats().TransferBytesReceived == maxBounceBuffers*regmem.ChunkSize }))
}

// Lengths that add up to more than an int holds, on 32-bit systems.
func TestTransferLengthsAddUp(t *testing.T) {
	c := &conn{}
	for range 4 {
		c.in.unread.Push(segment{transfer: &recvTransfer{length: transferCeiling}})
	}
	require.Equal(t, math.MaxInt32, c.offeredBytes(math.MaxInt32, false))
	require.Equal(t, 1, c.offeredBytes(1, false))
	require.Equal(t, int64(4*transferCeiling), int64(c.offeredBytes(math.MaxInt, false))+max(0, 4*transferCeiling-math.MaxInt))

	p, err := regmem.AllocPages(transferCeiling) // never touched
	require.NoError(t, err)
	defer regmem.FreePages(p)
	o := &sendTransfer{p: p, moved: transferCeiling, done: true, writing: 1}
	c.wrote(o, transferCeiling)
	require.Equal(t, transferCeiling, o.moved)
}

// A Write that gives up a transfer and leads hears of its end, also where that comes
// with what another goroutine posts.
func TestTransferOverForLeader(t *testing.T) {
	s := newScene(t)
	setWithdrawWithin(t, time.Hour)
	c, p := s.transferConns(false, false)
	wrote := writing(c, pattern(1, 100000))
	p.ExpectBegin(false)
	requireAsleep(t, c, func() bool {
		if c.lane.posting { // by the Write itself, which the peer has heard already
			return false
		}
		c.lane.posting = true // as if somebody did
		return true
	})
	c.SetWriteDeadline(time.Now())
	requireAsleep(t, c, func() bool { return c.tx.withdraw != nil })
	c.mu.Lock()
	c.lane.posting = false
	c.lane.flush()
	require.Zero(t, c.tx.live.Len())
	c.unlock()
	r := s.await(wrote)
	require.ErrorIs(t, r.err, os.ErrDeadlineExceeded)
	require.NoError(t, c.Close())
}

// A Close that does not linger waits for no peer, also where a Write has waited already
// for the peer to give up a transfer.
func TestTransferGivenUpAtClose(t *testing.T) {
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			s := newScene(t)
			setWithdrawWithin(t, time.Hour)
			c, p := s.transferConns(side.active, true)
			wrote := writing(c, pattern(1, 100000))
			h := p.ExpectBegin(true)
			c.SetWriteDeadline(time.Now())
			require.Equal(t, h.ID, p.ExpectTransfer(smbdpeer.Withdraw).ID) // to which it says nothing
			within(t, "Close", func() { c.Close() })
			require.ErrorIs(t, s.await(wrote).err, os.ErrDeadlineExceeded)
		})
	}
}

// queueBuffers queues messages that go by transfers and returns them with what the
// peer is told: of some of them at a time.
func queueBuffers(t *testing.T, c *Conn, p *smbdpeer.Raw, reads bool) (sends []*Send, told []smbdpeer.Transfer) {
	p.Grant(maxTransfers)
	for i := range 2 * maxBounceBuffers {
		buf := alloc(t, breachWrite)
		copy(buf.Bytes(), pattern(uint64(i), breachWrite))
		sends = append(sends, c.QueueMsg(buf.Bytes(), 0))
	}
	for range maxBounceBuffers {
		told = append(told, p.ExpectBegin(reads))
	}
	require.True(t, eventually(func() bool {
		c.mu.Lock()
		defer c.unlock()
		return c.queue.waiting == maxBounceBuffers-1 // and one has the turn
	}))
	return sends, told
}

func requireUnderWay(t *testing.T, sends []*Send) {
	t.Helper()
	for _, q := range sends {
		select {
		case <-q.Done():
			require.FailNow(t, "done before the peer has it")
		default:
		}
	}
}

// Queued sends follow each other while the peer fetches. A deadline concerns those of
// which it has not been told.
func TestQueuedTransfers(t *testing.T) {
	for _, late := range []bool{false, true} {
		t.Run(map[bool]string{false: "all", true: "deadline"}[late], func(t *testing.T) {
			eachTransferPeer(t, func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool) {
				sends, told := queueBuffers(t, c, p, reads)
				if late {
					c.SetWriteDeadline(past)
					for _, q := range sends[maxBounceBuffers:] {
						n, err := q.Result()
						require.Zero(t, n)
						requireTimeout(t, err)
					}
					sends = sends[:maxBounceBuffers]
				}
				for i, q := range sends {
					requireUnderWay(t, sends[i:])
					require.EqualValues(t, i+1, told[i].ID)
					require.True(t, bytes.Equal(pattern(uint64(i), breachWrite), p.Take(reads, told[i])))
					n, err := q.Result()
					require.NoError(t, err)
					require.Equal(t, breachWrite, n)
					if len(told) < len(sends) {
						told = append(told, p.ExpectBegin(reads))
					}
				}
				require.Zero(t, c.Stats().BytesCopied)
				c.SetWriteDeadline(time.Time{})
				_, err := c.Write([]byte("onwards"))
				require.NoError(t, err)
			})
		})
	}
}

// A peer that takes several at once says so once.
func TestQueuedTransfersDoneAtOnce(t *testing.T) {
	s := newScene(t)
	c, p := s.transferConns(true, true)
	sends, told := queueBuffers(t, c, p, true)
	p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Done, ID: told[2].ID, Length: told[2].Length})
	for _, q := range sends[:3] {
		n, err := q.Result()
		require.NoError(t, err)
		require.Equal(t, breachWrite, n)
	}
	requireUnderWay(t, sends[3:])
}

// What is under way ends with the connection, whichever way that ends; its memory is
// the caller's again then.
func TestQueuedTransfersEnd(t *testing.T) {
	for _, tt := range []struct {
		name string
		do   func(c *Conn, p *smbdpeer.Raw)
		want error
	}{
		{"Close", func(c *Conn, p *smbdpeer.Raw) { c.Close() }, net.ErrClosed},
		{"peer goes", func(c *Conn, p *smbdpeer.Raw) { p.ID.Disconnect() }, syscall.EPIPE},
		{"breach", func(c *Conn, p *smbdpeer.Raw) { p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Done, ID: 100}) }, syscall.ECONNRESET},
	} {
		t.Run(tt.name, func(t *testing.T) {
			eachTransferPeer(t, func(t *testing.T, s *scene, c *Conn, p *smbdpeer.Raw, reads bool) {
				sends, _ := queueBuffers(t, c, p, reads)
				tt.do(c, p)
				for _, q := range sends {
					n, err := q.Result()
					require.Zero(t, n)
					require.ErrorIs(t, err, tt.want)
				}
				within(t, "Close", func() { c.Close() })
			})
		})
	}
}

// Close sees off what is under way, as what was written.
func TestQueuedTransfersLinger(t *testing.T) {
	for _, m := range transferPeers {
		t.Run(m.name, func(t *testing.T) {
			s := newScene(t)
			s.cfg.LingerTimeout = patience
			c, p := s.transferConns(true, m.reads)
			sends, told := queueBuffers(t, c, p, m.reads)
			closed := make(chan error, 1)
			go func() { closed <- c.Close() }()
			for _, q := range sends[maxBounceBuffers:] {
				_, err := q.Result()
				require.ErrorIs(t, err, net.ErrClosed)
			}
			for i, h := range told {
				require.True(t, bytes.Equal(pattern(uint64(i), breachWrite), p.Take(m.reads, h)))
				n, err := sends[i].Result()
				require.NoError(t, err)
				require.Equal(t, breachWrite, n)
			}
			p.WaitEnd()
			require.NoError(t, <-closed)
		})
	}
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
func TestTransferGrantedInPieces(t *testing.T) {
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
func TestTransferBufferFreed(t *testing.T) {
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
