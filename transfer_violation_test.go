package rdmanet

import (
	"io"
	"math"
	"slices"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/smbdpeer"
)

// bogus is a key of nobody's, or hardly of anybody's.
const bogus = 0x7f7f7f01

// What a peer must not say of transfers ends the connection, with an error that
// says what it was.
func TestTransferProtocolViolations(t *testing.T) {
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

// Grants that are not answered yet are bounded, and go to one transfer after the other.
func TestTransferUnansweredGrantsBounded(t *testing.T) {
	const most = 16 // docs/protocol.md, section 6
	for _, tt := range []struct {
		name  string
		first []int // bytes of the grants for the first transfer
		then  []int // bytes of those for the second
		want  error // nil: all are answered
	}{
		{"as many as may be", slices.Repeat([]int{1}, most), nil, nil},
		{"one more", slices.Repeat([]int{1}, most+1), nil, errTransferCount},
		{"the first has its turn", []int{1}, []int{1}, errTransferID},
		{"the second has its turn", []int{breachWrite - 1, 1}, []int{1}, nil},
		{"one more for both", slices.Concat(slices.Repeat([]int{1}, most-1), []int{breachWrite - most + 1}), []int{1}, errTransferCount},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newScene(t)
			s.cfg.TransferSize, s.cfg.LingerTimeout = minTransfer, -1
			s.cfg.InitialReceiveCredits, s.cfg.MaxReceiveCredits = 2*most, 2*most
			ln := s.listen()
			p := dialRaw(t, ln.Addr(), transferPrivate(false))
			request := goodRequest
			request.CreditsRequested = 2 * most
			p.Negotiate(request)
			nc, err := ln.Accept()
			require.NoError(t, err)
			c := s.owned(nc)
			p.Grant(2 * most)
			var sends []*PendingMessage
			for range 2 {
				sends = append(sends, c.QueueMsg(alloc(t, breachWrite).Bytes()))
				require.EqualValues(t, breachWrite, p.ExpectBegin(false).Length)
			}
			addr, key := p.Register(make([]byte, breachWrite))
			waitCredits(t, p, len(tt.first)+len(tt.then))
			s.together(c, len(tt.first)+len(tt.then), func() {
				for i, lengths := range [][]int{tt.first, tt.then} {
					for _, n := range lengths {
						p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Grant, ID: uint32(i + 1), Addr: addr, Key: key, Length: uint32(n)})
					}
				}
			})
			if tt.want != nil {
				requireCause(t, s.logged(), tt.want)
				p.WaitEnd()
				for _, q := range sends {
					_, err := q.Result()
					requireCause(t, err, tt.want)
				}
				return
			}
			for i, lengths := range [][]int{tt.first, tt.then} {
				for _, n := range lengths {
					require.Equal(t, smbdpeer.Transfer{Kind: smbdpeer.Written, ID: uint32(i + 1), Length: uint32(n)}, p.ExpectTransfer(smbdpeer.Written))
				}
			}
			p.SendTransfer(smbdpeer.Transfer{Kind: smbdpeer.Grant, ID: uint32(1 + len(tt.then)), Addr: addr, Key: key, Length: 1}) // there is room again
			p.ExpectTransfer(smbdpeer.Written)
		})
	}
}

// An offer, or a grant, whose memory the device cannot use ends the connection
// that takes it up, and leaves the others alone.
func TestTransferInvalidKeyEndsConnection(t *testing.T) {
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
