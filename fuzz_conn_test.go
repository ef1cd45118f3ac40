package rdmanet

import (
	"io"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
)

// The operations that an input of FuzzConn is made of. Each is an octet and its
// arguments; what is missing at the end is zero.
const (
	fuzzData    = iota // n: a message of n*8 bytes
	fuzzMutated        // i, v: such a message with octet i of its header replaced
	fuzzPart           // n, rest: a segment that announces rest*8 more
	fuzzGrant          // n: grant n*n credits
	fuzzProbe          // ask for an answer
	fuzzFIN            // end the stream
	fuzzRaw            // n, then n octets as they are
	fuzzHear           // take what has come, so that more can
	fuzzLeave          // disconnect
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

// play does what the script says until it or the connection ends.
func (p *badPeer) play(s script) {
	for steps := 0; len(s) > 0 && steps < 200; steps++ {
		select {
		case <-p.over:
			return
		default:
		}
		var b []byte
		switch s.next() % fuzzOps {
		case fuzzData:
			b = dataSegment(int(s.next())*8, 0)
		case fuzzMutated:
			b = dataSegment(64, 0)
			at := int(s.next()) % dataHeaderLen
			b[at] = s.next()
		case fuzzPart:
			n := int(s.next())
			b = dataSegment(n, int(s.next())*8)
		case fuzzGrant:
			n := uint16(s.next())
			b = wireSegment(dataHeaderLen, segmentHeader{CreditsRequested: 16, CreditsGranted: n * n})
		case fuzzProbe:
			b = wireSegment(dataHeaderLen, segmentHeader{CreditsRequested: 1, CreditsGranted: 1, Flags: flagResponseRequested})
		case fuzzFIN:
			b = wireSegment(dataHeaderLen, segmentHeader{CreditsRequested: 1, CreditsGranted: 1, Flags: flagFIN})
		case fuzzRaw:
			b = s.take(int(s.next()))
		case fuzzHear:
			p.overhear()
			continue
		case fuzzLeave:
			p.id.Disconnect()
			return
		}
		p.say(b)
	}
}

// overhear takes messages that have come, without waiting for any.
func (p *badPeer) overhear() {
	var wcs [8]ibv.WC
	n, _ := p.cq.Poll(wcs[:])
	for _, wc := range wcs[:n] {
		switch {
		case wc.Status != ibv.WCSuccess:
			p.flushed = true
		case wc.Op == ibv.WCRecv:
			p.receive(int(wc.ID))
		}
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
		f.Add([]byte{mode, fuzzLeave})
	}
	for _, rest := range [][]byte{{fuzzData, 3, fuzzHear, fuzzGrant, 3, fuzzData, 1, fuzzFIN}, {fuzzLeave}} {
		f.Add(append(append(append([]byte{fuzzEarly, negotiateRequestLen + 2}, goodRequest.wire()...), wireGrant(8)...), rest...))
		f.Add(append(append([]byte{fuzzEarly | fuzzActive, negotiateResponseLen}, goodResponse.wire()...), rest...))
	}
	f.Add(append([]byte{fuzzHandshake, fuzzRaw, negotiateRequestLen}, goodRequest.wire()...))
	f.Add(append([]byte{fuzzHandshake | fuzzActive, fuzzRaw, negotiateResponseLen}, goodResponse.wire()...))
	f.Add(append([]byte{fuzzHandshake | fuzzActive, fuzzRaw, negotiateResponseLen}, refusal(statusNotSupported).wire()...))

	f.Fuzz(func(t *testing.T, input []byte) {
		in := script(input)
		mode := in.next()
		s := newScene(t)
		s.cfg.LingerTimeout = 10 * time.Millisecond
		var private []byte
		if mode&fuzzRdmanet != 0 {
			private = rdmanetPrivate
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
			ln := listenBad(t)
			result := s.dial(ln)
			p := acceptBad(t, ln)
			require.NoError(t, p.id.Accept(tctx, ibv.ConnParam{Private: private}))
			p.play(in)
			p.id.Disconnect()
			if r := <-result; r.err == nil {
				s.fuzzConn(r.c.(*Conn), p, mode, nil)
			}
			return
		}
		ln := s.listen()
		p := dialBad(t, ln.Addr(), private)
		p.play(in)
		p.id.Disconnect()
		p.ended()
		require.NoError(t, ln.Close()) // ends what has been set up, too
	})
}

// fuzzConn uses a connection both ways while its peer plays the script.
func (s *scene) fuzzConn(c *Conn, p *badPeer, mode byte, in script) {
	t := s.t
	c.SetDeadline(time.Now().Add(patience))
	var wg sync.WaitGroup
	wg.Go(func() {
		b := make([]byte, 700)
		for {
			var err error
			if mode&fuzzMsg != 0 {
				if _, err = c.ReadMsg(b); err == io.ErrShortBuffer {
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
		for {
			var err error
			if mode&fuzzMsg != 0 {
				err = c.WriteMsg(b)
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
	p.play(in)
	if mode&fuzzClose == 0 {
		p.id.Disconnect()
		p.ended()
		wg.Wait()
	}
	within(t, "Close", func() { c.Close() })
	wg.Wait()
}

// ended checks the error that a call ended with: anything but the deadline,
// which would mean that it hung.
func (s *scene) ended(err error) {
	if te, ok := err.(interface{ Timeout() bool }); ok && te.Timeout() {
		s.t.Errorf("a call hung: %v", err)
	}
}
