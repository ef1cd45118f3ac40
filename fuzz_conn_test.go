package rdmanet

import (
	"errors"
	"io"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/smbdpeer"
)

// The operations that an input of FuzzConn is made of. Each is an octet and its
// arguments; what is missing at the end is zero.
const (
	fuzzData     = iota // n: a message of n*8 bytes
	fuzzMutated         // i, v: such a message with octet i of its header replaced
	fuzzPart            // n, rest: a segment that announces rest*8 more
	fuzzGrant           // n: grant n*n credits
	fuzzProbe           // ask for an answer
	fuzzFIN             // end the stream
	fuzzRaw             // n, then n octets as they are
	fuzzHear            // take what has come, so that more can
	fuzzLeave           // disconnect
	fuzzTransfer        // kind, flags, id, n, rest: a transfer header for n*n*8 bytes of memory that is there, or is not
	fuzzOffer           // n, rest: the next transfer begins
	fuzzAnswer          // n: what a good peer would say to the transfer header heard last, but with n*8 bytes less
	fuzzFlagged         // flags, n, rest: a segment of n bytes with the upper half of its flags, that announces rest more
	fuzzOps
)

// Bits of the first octet of an input.
const (
	fuzzActive     = 1 << iota // the connection under test is the dialled one
	fuzzRdmanet                // the peer knows half-close
	fuzzMsg                    // ReadMsg and WriteMsg instead of Read and Write
	fuzzClose                  // Close while the peer is still talking
	fuzzHandshake              // the input starts with the negotiation
	fuzzCloseWrite             // CloseWrite after the first Write
	fuzzEarly                  // the input starts with an early negotiation: n, then n octets
	fuzzTransfers              // the peer knows half-close and large transfers, and without fuzzRdmanet no RDMA Reads
)

// A script is what is left of an input.
type script []byte

func (s *script) next() byte {
	if len(*s) == 0 {
		return 0
	}
	b := (*s)[0]
	*s = (*s)[1:]
	return b
}

func (s *script) take(n int) []byte {
	n = min(n, len(*s))
	b := (*s)[:n]
	*s = (*s)[n:]
	return b
}

// play has the peer do what the script says until it or the connection ends. reads says how
// its transfers move.
func (s script) play(t testing.TB, p *smbdpeer.Raw, reads bool) {
	talk := transferTalk{t: t}
	for steps := 0; len(s) > 0 && steps < 200; steps++ {
		select {
		case <-p.Over():
			return
		default:
		}
		var b []byte
		switch s.next() % fuzzOps {
		case fuzzData:
			b = smbdpeer.Segment(int(s.next())*8, 0)
		case fuzzMutated:
			b = smbdpeer.Segment(64, 0)
			at := int(s.next()) % smbdpeer.HeaderLen
			b[at] = s.next()
		case fuzzPart:
			n := int(s.next())
			b = smbdpeer.Segment(n, int(s.next())*8)
		case fuzzGrant:
			n := uint16(s.next())
			b = smbdpeer.DataTransfer{CreditsRequested: 16, CreditsGranted: n * n}.Message(smbdpeer.HeaderLen)
		case fuzzProbe:
			b = smbdpeer.DataTransfer{CreditsRequested: 1, CreditsGranted: 1, Flags: smbdpeer.FlagResponseRequested}.Message(smbdpeer.HeaderLen)
		case fuzzFIN:
			b = smbdpeer.DataTransfer{CreditsRequested: 1, CreditsGranted: 1, Flags: smbdpeer.FlagFIN}.Message(smbdpeer.HeaderLen)
		case fuzzRaw:
			b = s.take(int(s.next()))
		case fuzzHear:
			talk.hear(p)
			continue
		case fuzzTransfer:
			h := smbdpeer.Transfer{Kind: smbdpeer.TransferKind(s.next()), Flags: s.next(), ID: uint32(s.next())}
			n := uint32(s.next())
			h.Length, h.Rest = n*n*8, uint64(s.next())*8
			if h.Flags&0x80 == 0 {
				h.Addr, h.Key = talk.memory(p)
			}
			b = h.Message(nil)
		case fuzzOffer:
			talk.begun++
			h := smbdpeer.Transfer{Kind: smbdpeer.Request, ID: talk.begun, Length: 8 + uint32(s.next())*8, Rest: uint64(s.next()) * 8}
			if reads {
				h.Kind = smbdpeer.Offer
				h.Addr, h.Key = talk.memory(p)
			}
			b = h.Message(make([]byte, 10))
		case fuzzAnswer:
			h := talk.answer(p, uint32(s.next())*8)
			b = h.Message(nil)
		case fuzzFlagged:
			flags, n := s.next(), int(s.next())
			b = smbdpeer.Segment(n, int(s.next()))
			if n == 0 {
				b = smbdpeer.DataTransfer{CreditsRequested: 16, CreditsGranted: 1}.Message(smbdpeer.HeaderLen)
			}
			b[5] = flags
		case fuzzLeave:
			p.ID.Disconnect()
			return
		}
		p.Send(b)
	}
}

// transferTalk is what a peer remembers of transfers.
type transferTalk struct {
	t     testing.TB
	addr  uint64
	key   uint32
	begun uint32            // ID of its latest
	heard smbdpeer.Transfer // the last one
}

// memory returns where the peer has memory for the other side.
func (k *transferTalk) memory(p *smbdpeer.Raw) (addr uint64, key uint32) {
	if k.key == 0 {
		k.addr, k.key = p.Register(make([]byte, 64<<10))
	}
	return k.addr, k.key
}

// answer is what a good peer says next.
func (k *transferTalk) answer(p *smbdpeer.Raw, less uint32) smbdpeer.Transfer {
	h := smbdpeer.Transfer{ID: k.heard.ID, Length: k.heard.Length - less}
	switch k.heard.Kind {
	case smbdpeer.Request:
		h.Kind = smbdpeer.Grant
		h.Addr, h.Key = k.memory(p)
	case smbdpeer.Grant:
		h.Kind = smbdpeer.Written
	default:
		h.Kind = smbdpeer.Done
	}
	return h
}

// hear takes messages that have come, without waiting for any.
func (k *transferTalk) hear(p *smbdpeer.Raw) {
	for _, b := range p.Poll() {
		if h, _, err := smbdpeer.ParseDataTransfer(b); err != nil || h.Flags&smbdpeer.FlagTransfer == 0 {
			continue
		}
		var err error
		k.heard, err = smbdpeer.ParseTransfer(b)
		require.NoError(k.t, err)
	}
}

// Whatever a peer sends, reading and writing end with an error or the end of
// the stream, and nothing is left behind.
func FuzzConn(f *testing.F) {
	plain, rdma := byte(0), byte(fuzzRdmanet)
	for _, mode := range []byte{plain, rdma, rdma | fuzzActive, plain | fuzzMsg, rdma | fuzzClose, rdma | fuzzCloseWrite} {
		f.Add([]byte{mode, fuzzGrant, 3, fuzzData, 100, fuzzHear, fuzzData, 1, fuzzFIN, fuzzLeave})
		f.Add([]byte{mode, fuzzPart, 80, 2, fuzzPart, 8, 1, fuzzPart, 8, 0, fuzzProbe, fuzzHear, fuzzGrant, 255, fuzzGrant, 255})
		f.Add([]byte{mode, fuzzData, 1, fuzzMutated, 12, 25})
		f.Add([]byte{mode, fuzzData, 1, fuzzMutated, 8, 1, fuzzData, 1})
		f.Add([]byte{mode, fuzzFIN, fuzzData, 0, fuzzData, 1})
		f.Add([]byte{mode, fuzzRaw, 3, 1, 2, 3})
		f.Add([]byte{mode, fuzzFlagged, 0x10, 9, 0, fuzzFlagged, 0x10, 9, 9, fuzzFlagged, 0x10, 9, 0, fuzzFlagged, 8, 0, 0, fuzzFlagged, 0x88, 0, 0})
		f.Add([]byte{mode, fuzzGrant, 9, fuzzFlagged, 0x34, 9, 0, fuzzFlagged, 0x20, 9, 0, fuzzHear, fuzzFlagged, 0x28, 0, 0, fuzzFlagged, 0x10, 9, 0, fuzzFIN})
		f.Add([]byte{mode, fuzzLeave})
	}
	for _, mode := range []byte{0, fuzzActive, fuzzMsg, fuzzClose, fuzzCloseWrite} {
		for _, how := range []byte{fuzzTransfers, fuzzTransfers | fuzzRdmanet} {
			mode |= how
			f.Add([]byte{mode, fuzzOffer, 255, 0, fuzzHear, fuzzAnswer, 0, fuzzHear, fuzzOffer, 1, 0, fuzzHear, fuzzAnswer, 0, fuzzFIN})
			f.Add([]byte{mode, fuzzGrant, 3, fuzzHear, fuzzAnswer, 0, fuzzHear, fuzzHear, fuzzAnswer, 0, fuzzGrant, 3, fuzzHear, fuzzAnswer, 0, fuzzHear})
			f.Add([]byte{mode, fuzzOffer, 255, 4, fuzzOffer, 0, 0, fuzzData, 1, fuzzHear, fuzzGrant, 2, fuzzAnswer, 1})
			f.Add([]byte{mode, fuzzOffer, 200, 0, fuzzTransfer, 6, 2, 1, 0, 0, fuzzHear, fuzzTransfer, 4, 1, 1, 0, 0, fuzzData, 1})
			f.Add([]byte{mode, fuzzTransfer, 1, 0x80, 1, 90, 0, fuzzHear, fuzzHear})
			f.Add([]byte{mode, fuzzTransfer, 2, 0, 1, 90, 0, fuzzHear, fuzzAnswer, 0})
			f.Add([]byte{mode, fuzzGrant, 3, fuzzHear, fuzzTransfer, 3, 0x80, 1, 9, 0, fuzzHear, fuzzTransfer, 5, 0, 1, 9, 0})
			f.Add([]byte{mode, fuzzOffer, 1, 0, fuzzLeave})
		}
	}
	for _, rest := range [][]byte{{fuzzData, 3, fuzzHear, fuzzGrant, 3, fuzzData, 1, fuzzFIN}, {fuzzLeave}} {
		f.Add(append(append(append([]byte{fuzzEarly, smbdpeer.NegotiateRequestLen + 2}, goodRequest.Append(nil)...), wireGrant(8)...), rest...))
		f.Add(append(append([]byte{fuzzEarly | fuzzActive, smbdpeer.NegotiateResponseLen}, goodResponse.Append(nil)...), rest...))
	}
	f.Add(append([]byte{fuzzHandshake, fuzzRaw, smbdpeer.NegotiateRequestLen}, goodRequest.Append(nil)...))
	f.Add(append([]byte{fuzzHandshake | fuzzActive, fuzzRaw, smbdpeer.NegotiateResponseLen}, goodResponse.Append(nil)...))
	f.Add(append([]byte{fuzzHandshake | fuzzActive, fuzzRaw, smbdpeer.NegotiateResponseLen}, smbdpeer.Refusal(smbdpeer.StatusNotSupported).Append(nil)...))

	f.Fuzz(func(t *testing.T, input []byte) {
		in := script(input)
		mode := in.next()
		s := newScene(t)
		s.cfg.LingerTimeout = 10 * time.Millisecond
		if testDevice(t).Attr().Quirks.EmptyReadsGarbled {
			// siw overlooks an end that comes right behind the beginning, now and then.
			s.cfg.KeepAlive = patience / 10
		}
		var private []byte
		switch {
		case mode&fuzzTransfers != 0:
			setWithdrawWithin(t, 20*time.Millisecond)
			s.cfg.TransferSize = minTransfer
			private = transferPrivate(mode&fuzzRdmanet != 0)
		case mode&fuzzRdmanet != 0:
			private = messagesPrivate
		}
		if mode&fuzzEarly != 0 {
			mode |= fuzzHandshake
			private = earlyPrivate(in.take(int(in.next()) % 100))
		}
		if mode&fuzzHandshake == 0 {
			c, p := s.conns(mode&fuzzActive != 0, private)
			s.fuzzConn(c, p, mode, in)
			return
		}
		if mode&fuzzActive != 0 {
			ln := listenRaw(t)
			result := s.dial(ln)
			p := acceptRaw(t, ln)
			require.NoError(t, p.ID.Accept(tctx, ibv.ConnParam{Private: private}))
			in.play(t, p, mode&fuzzRdmanet != 0)
			p.ID.Disconnect()
			if r := <-result; r.err == nil {
				s.fuzzConn(r.c.(*Conn), p, mode, nil)
			}
			return
		}
		ln := s.listen()
		p := dialRaw(t, ln.Addr(), private)
		in.play(t, p, mode&fuzzRdmanet != 0)
		p.ID.Disconnect()
		p.WaitEnd()
		require.NoError(t, ln.Close()) // ends what has been set up, too
	})
}

// fuzzConn uses a connection both ways while its peer plays the script.
func (s *scene) fuzzConn(c *Conn, p *smbdpeer.Raw, mode byte, in script) {
	t := s.t
	c.SetDeadline(time.Now().Add(patience))
	var wg sync.WaitGroup
	wg.Go(func() {
		b := make([]byte, 700)
		if mode&fuzzTransfers != 0 && len(in)%2 == 0 {
			b = make([]byte, directReadMin)
		}
		for turns := 0; ; {
			var err error
			if mode&fuzzMsg != 0 {
				read := c.ReadMsg
				if turns++; turns%2 == 0 {
					read = func(b []byte) (int, error) {
						n, _, err := c.ReadPiece(b)
						return n, err
					}
				}
				if _, err = read(b); errors.Is(err, io.ErrShortBuffer) {
					_, err = c.Read(b)
				}
			} else {
				_, err = c.Read(b)
			}
			if err != nil {
				s.ended(err)
				return
			}
		}
	})
	wg.Go(func() {
		b := make([]byte, 3000)
		if mode&fuzzTransfers != 0 {
			b = make([]byte, 20000)
		}
		for turns := 0; ; {
			var err error
			if mode&fuzzMsg != 0 {
				flags := MsgFlags(turns % 8)
				if turns++; turns%8 == 0 || !c.messages || turns%2 == 0 { // ends what has been begun
					flags &^= Partial
				}
				queued := c.QueueMsg(b, flags)
				for err = syscall.EAGAIN; errors.Is(err, syscall.EAGAIN); {
					if _, err = c.WriteMsg(b, flags&^Partial|NonBlocking); errors.Is(err, syscall.EAGAIN) {
						<-c.Writable()
					}
				}
				_, err2 := queued.Result()
				err = errors.Join(err, err2)
			} else {
				_, err = c.Write(b)
			}
			if err == nil && mode&fuzzCloseWrite != 0 {
				err = c.CloseWrite()
				if err == nil {
					return
				}
			}
			if err != nil {
				s.ended(err)
				return
			}
		}
	})
	in.play(t, p, mode&fuzzRdmanet != 0)
	if mode&fuzzClose == 0 {
		p.ID.Disconnect()
		p.WaitEnd()
		wg.Wait()
	}
	within(t, "Close", func() { c.Close() })
	wg.Wait()
}

// ended checks the error that a call ended with: anything but the deadline,
// which would mean that it hung.
func (s *scene) ended(err error) {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		s.t.Errorf("a call hung: %v", err)
	}
}
