package iwarp

import (
	"context"
	"encoding/binary"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// header is the front of a Start frame.
func header(key string, flags, rev byte, private int) []byte {
	b := append([]byte(key), flags, rev)
	return binary.BigEndian.AppendUint16(b, uint16(private))
}

const (
	requestKey = "MPA ID Req Frame"
	replyKey   = "MPA ID Rep Frame"
)

// reasonable is a time in which a good peer does what it must, on a busy machine too.
// Tests wait so long for a silent one.
const reasonable = 300 * time.Millisecond

// A peer that connects and is no good does not get as far as the program, and
// keeps nobody else out.
func TestBadRequests(t *testing.T) {
	for _, tt := range []struct {
		name string
		send []byte
		quit bool // the peer ends its stream after that
	}{
		{name: "silent"},
		{name: "closes at once", quit: true},
		{name: "silent inside the header", send: header(requestKey, 0, 1, 0)[:19]},
		{name: "closes inside the header", send: header(requestKey, 0, 1, 0)[:1], quit: true},
		{name: "silent before its private data", send: header(requestKey, 0, 1, 8)},
		{name: "closes inside its private data", send: append(header(requestKey, 0, 1, 8), 1, 2, 3), quit: true},
		{name: "another protocol", send: []byte("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")},
		{name: "key wrong in its last octet", send: header("MPA ID Req Framf", 0, 1, 0)},
		{name: "a Reply", send: header(replyKey, 0, 1, 0)},
		{name: "revision 0", send: header(requestKey, 0, 0, 0)},
		{name: "revision 3", send: header(requestKey, 0, 3, 0)},
		{name: "revision 255", send: header(requestKey, 0, 255, 0)},
		{name: "private data one octet over the limit", send: append(header(requestKey, 0, 1, 513), make([]byte, 513)...)},
		{name: "private data of 65535 octets", send: header(requestKey, 0, 1, 65535)},
		{name: "enhanced without control octets", send: header(requestKey, 0x10, 2, 0)},
		{name: "enhanced with too few control octets", send: append(header(requestKey, 0x10, 2, 3), 0, 0, 0)},
		{name: "frames before the reply", send: append(request(false), rtrFrame(false)...)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			leaktest.Check(t)
			s := newSite(t, Config{RequestTimeout: reasonable})
			p := dialRaw(t, s.ln.Addr())
			p.send(tt.send)
			if tt.quit {
				p.hangUp(false)
			}
			p.ended()
			good := s.bystander()
			require.Equal(t, good.p.conn.LocalAddr(), net.TCPAddrFromAddrPort(good.v.id.RemoteAddr()), "the bad peer was handed out")
			good.check()
			good.close()
		})
	}
}

// Markers are optional to send and a must to honour; a peer that demands them
// is told no.
func TestMarkersDemanded(t *testing.T) {
	leaktest.Check(t)
	s := newSite(t, Config{})
	p := dialRaw(t, s.ln.Addr())
	p.send(header(requestKey, 0x80, 1, 0))
	require.True(t, p.start(true).Reject)
	p.ended()
	good := s.bystander()
	good.check()
	good.close()
}

// Half-open connections beyond the bound are dropped, the oldest first, so a
// flood of silent peers stops no good one.
func TestHalfOpenFlood(t *testing.T) {
	leaktest.Check(t)
	const bound = 4
	s := newSite(t, Config{MaxHalfOpen: bound, RequestTimeout: time.Hour})
	var silent []*rawPeer
	for range 8 * bound {
		silent = append(silent, dialRaw(t, s.ln.Addr()))
	}
	good := s.bystander()
	good.check()
	for _, p := range silent[:len(silent)-bound] {
		p.ended()
	}
	s.ln.(*listener).mu.Lock()
	half := s.ln.(*listener).half.Len()
	s.ln.(*listener).mu.Unlock()
	require.Less(t, half, bound+1)
	good.close()
	for _, p := range silent {
		p.conn.Close()
	}
}

// A listener that is closed ends the connections that are half open.
func TestCloseWithHalfOpen(t *testing.T) {
	leaktest.Check(t)
	s := &site{t: t, p: newOverTCP(Config{RequestTimeout: time.Hour})}
	var err error
	s.ln, err = s.p.Listen(t.Context(), loopback, 0)
	require.NoError(t, err)
	silent, asking := dialRaw(t, s.ln.Addr()), dialRaw(t, s.ln.Addr())
	asking.send(request(false))
	id := s.accept()
	waiting := dialRaw(t, s.ln.Addr())
	waiting.send(request(false))
	require.NoError(t, s.ln.Close())
	silent.ended()
	waiting.drain()
	require.NoError(t, id.Close())
	asking.ended()
}

// A connection that comes in while the listener is being closed is not waited
// for.
func TestAdmitAfterClose(t *testing.T) {
	leaktest.Check(t)
	s := newSite(t, Config{})
	ln := rawListener(t)
	p := dialRaw(t, unmapped(ln.Addr()))
	conn, err := ln.AcceptTCP()
	require.NoError(t, err)
	require.NoError(t, s.ln.Close())
	s.ln.(*listener).admit(conn)
	p.ended()
}

// A raw listener is where the device connects to.
func rawListener(t *testing.T) *net.TCPListener {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { ln.Close() })
	return ln.(*net.TCPListener)
}

// dialing has a victim connect to ln, in the background.
func dialing(t testing.TB, cfg Config, ln *net.TCPListener) (v *victim, result chan error) {
	p := newOverTCP(cfg)
	id, err := p.Resolve(t.Context(), loopback, unmapped(ln.Addr()))
	require.NoError(t, err)
	v = newVictim(t, id, newMemory(t, p), 2)
	result = make(chan error, 1)
	go func() { result <- id.Connect(context.Background(), depths) }()
	return v, result
}

// dialingRaw has a device dial a peer that a test plays, and takes its Request. result has the error of
// Connect.
func dialingRaw(t *testing.T, cfg Config) (v *victim, p *rawPeer, result chan error) {
	ln := rawListener(t)
	v, result = dialing(t, cfg, ln)
	conn, err := ln.Accept()
	require.NoError(t, err)
	p = newRawPeer(t, conn)
	p.start(false)
	return v, p, result
}

// reply is a Reply frame with its IRD and ORD words, flags included, as given.
func reply(ird, ord uint16) []byte {
	b := header(replyKey, 0x10, 2, 4)
	return binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(b, ird), ord)
}

// A peer that answers and is no good makes Connect fail, with one clear error,
// and leaves nothing behind.
func TestBadReplies(t *testing.T) {
	for _, tt := range []struct {
		name string
		send []byte
		quit bool
		want error
		term *iwarpwire.TermError // told to the peer
	}{
		{name: "silent", want: syscall.ETIMEDOUT},
		{name: "silent inside the header", send: header(replyKey, 0, 1, 0)[:19], want: syscall.ETIMEDOUT},
		{name: "silent before its private data", send: header(replyKey, 0, 1, 8), want: syscall.ETIMEDOUT},
		{name: "closes at once", quit: true, want: syscall.ECONNRESET},
		{name: "closes inside the header", send: header(replyKey, 0, 1, 0)[:7], quit: true, want: syscall.ECONNRESET},
		{name: "closes inside its private data", send: header(replyKey, 0, 1, 8), quit: true, want: syscall.ECONNRESET},
		{name: "another protocol", send: []byte("HTTP/1.1 400 Bad Request\r\n\r\n"), want: iwarpwire.ErrKey},
		{name: "a Request", send: header(requestKey, 0, 1, 0), want: iwarpwire.ErrKey},
		{name: "revision 0", send: header(replyKey, 0, 0, 0), want: iwarpwire.ErrRevision},
		{name: "revision 3", send: header(replyKey, 0, 3, 0), want: iwarpwire.ErrRevision},
		{name: "private data one octet over the limit", send: header(replyKey, 0, 1, 513), want: iwarpwire.ErrPrivateLen},
		{name: "enhanced without control octets", send: header(replyKey, 0x10, 2, 0), want: iwarpwire.ErrControl},
		{name: "markers", send: header(replyKey, 0x80, 1, 0), want: errMarkers},
		{name: "frames before the first of ours", send: append(reply(2, 2), rtrFrame(false)...), want: errEarly},
		{name: "refusal", send: header(replyKey, 0x20, 1, 0), want: syscall.ECONNREFUSED},
		{name: "more Reads than we serve", send: reply(2, 3), want: iwarpwire.ErrInsufficientIRD, term: iwarpwire.ErrInsufficientIRD},
		{name: "RTR wanted and none known", send: reply(0x8000|2, 2), want: iwarpwire.ErrNoRTR, term: iwarpwire.ErrNoRTR},
		{name: "RTR by a Send, which was not offered", send: reply(0xc000|2, 2), want: iwarpwire.ErrNoRTR, term: iwarpwire.ErrNoRTR},
	} {
		t.Run(tt.name, func(t *testing.T) {
			leaktest.Check(t)
			ln := rawListener(t)
			cfg := Config{}
			if tt.want == syscall.ETIMEDOUT {
				cfg.ConnectTimeout = reasonable
			}
			v, result := dialing(t, cfg, ln)
			conn, err := ln.Accept()
			require.NoError(t, err)
			p := newRawPeer(t, conn)
			p.start(false)
			p.send(tt.send)
			if tt.quit {
				p.hangUp(false)
			}
			err = <-result
			require.Error(t, err)
			if tt.want == syscall.ETIMEDOUT {
				require.True(t, isTimeout(err), "%v", err)
			} else {
				require.ErrorIs(t, err, tt.want)
			}
			if tt.want == syscall.ECONNRESET || tt.want == iwarpwire.ErrKey {
				require.ErrorContains(t, err, "does not speak iWARP") // but plain TCP, as likely as not
			}
			if tt.term != nil {
				require.Equal(t, *tt.term, p.terminate().Err)
			} else {
				p.ended()
			}
			require.Equal(t, ibv.QPSInit, v.qp.State())
			v.close()
			require.Empty(t, v.events)
			require.Zero(t, v.mem.touched())
			v.mem.close()
		})
	}
}

// The reason of a refusal reaches the program.
func TestRefusalCarriesPrivateData(t *testing.T) {
	leaktest.Check(t)
	v, p, result := dialingRaw(t, Config{})
	p.send(header(replyKey, 0x20, 1, 4), []byte("full"))
	var rejected *ibv.RejectError
	require.ErrorAs(t, <-result, &rejected)
	require.Equal(t, "full", string(rejected.Private))
	p.ended()
	v.close()
	v.mem.close()
}

// A peer that has gone before the program answers its request costs that
// connection only.
func TestPeerGoneBeforeAccept(t *testing.T) {
	eachMode(t, func(t *testing.T, cfg Config) {
		for _, reset := range []bool{false, true} {
			leaktest.Check(t)
			s := newSite(t, cfg)
			p := dialRaw(t, s.ln.Addr())
			p.send(request(false))
			mem := newMemory(t, s.p)
			v := newVictim(t, s.accept(), mem, 1)
			p.hangUp(reset)
			if err := v.id.Accept(t.Context(), depths); err == nil {
				require.Equal(t, map[uint64]ibv.WCStatus{0: ibv.WCFlushErr}, v.completions(1))
				v.event()
			}
			v.close()
			mem.close()
			p.drain()
			good := s.bystander()
			good.check()
			good.close()
		}
	})
}
