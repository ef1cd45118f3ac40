package rdmanet

import (
	"context"
	"errors"
	"io"
	"math"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/smbdpeer"
)

// sides are the roles that a connection under test can have.
var sides = []struct {
	name   string
	active bool
}{{"dialled", true}, {"accepted", false}}

// exchange passes a message each way between a fresh connection and the
// listener: a bad peer has kept nobody out.
func (s *scene) exchange(ln *Listener) {
	t := s.t
	t.Helper()
	d := Dialer{Config: s.cfg}
	client, err := d.Dial("rdma", ln.Addr().String())
	require.NoError(t, err)
	server, err := ln.Accept()
	require.NoError(t, err)
	pass(t, client, server)
	pass(t, server, client)
	require.NoError(t, client.Close())
	require.NoError(t, server.Close())
}

func pass(t testing.TB, from, to net.Conn) {
	t.Helper()
	const msg = "still here"
	_, err := io.WriteString(from, msg)
	require.NoError(t, err)
	require.NoError(t, defect.ReadFull(to, msg))
}

// Requests that a listener must refuse: with a response that says why where
// [MS-SMBD] 3.1.5.6 has one, and in any case with the end of the connection.
func TestHostileRequests(t *testing.T) {
	with := func(change func(m *smbdpeer.NegotiateRequest)) []byte {
		m := goodRequest
		change(&m)
		return m.Append(nil)
	}
	for _, tt := range []struct {
		name string
		send [][]byte
		want error
		told uint32 // status in the response
	}{
		{name: "empty", send: [][]byte{nil}, want: errRequestShort},
		{name: "short", send: [][]byte{goodRequest.Append(nil)[:smbdpeer.NegotiateRequestLen-1]}, want: errRequestShort},
		{name: "longer than the receive", send: [][]byte{append(goodRequest.Append(nil), make([]byte, negotiateBuf)...)}, want: errTooLong},
		{name: "older version", send: [][]byte{with(func(m *smbdpeer.NegotiateRequest) { m.MinVersion, m.MaxVersion = 0, 0xff })}, want: errVersion, told: smbdpeer.StatusNotSupported},
		{name: "newer version", send: [][]byte{with(func(m *smbdpeer.NegotiateRequest) { m.MinVersion, m.MaxVersion = 0x101, 0x200 })}, want: errVersion, told: smbdpeer.StatusNotSupported},
		{name: "versions the wrong way round", send: [][]byte{with(func(m *smbdpeer.NegotiateRequest) { m.MinVersion, m.MaxVersion = 0x200, 0x0 })}, want: errVersion, told: smbdpeer.StatusNotSupported},
		{name: "no credits", send: [][]byte{with(func(m *smbdpeer.NegotiateRequest) { m.CreditsRequested = 0 })}, want: errCreditsRequested},
		{name: "receive size 0", send: [][]byte{with(func(m *smbdpeer.NegotiateRequest) { m.MaxReceiveSize = 0 })}, want: errReceiveSize},
		{name: "receive size one too small", send: [][]byte{with(func(m *smbdpeer.NegotiateRequest) { m.MaxReceiveSize = 127 })}, want: errReceiveSize},
		{name: "fragmented size one too small", send: [][]byte{with(func(m *smbdpeer.NegotiateRequest) { m.MaxFragmentedSize = 131071 })}, want: errFragmentedSize},
		{name: "data first", send: [][]byte{smbdpeer.Segment(100, 0)}, want: errVersion, told: smbdpeer.StatusNotSupported},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newScene(t)
			ln := s.listen()
			p := dialRaw(t, ln.Addr(), nil)
			for _, b := range tt.send {
				p.Send(b)
			}
			err := s.logged()
			requireCause(t, err, tt.want)
			if tt.told != 0 {
				resp, err := smbdpeer.ParseNegotiateResponse(p.Receive())
				require.NoError(t, err)
				require.Equal(t, smbdpeer.Refusal(tt.told), resp)
			}
			p.WaitEnd()
			s.exchange(ln)
		})
	}
}

// Values at the far end of their range are good ones: they bound what we may
// send, and cost nothing.
func TestLargestRequest(t *testing.T) {
	s := newScene(t)
	ln := s.listen()
	p := dialRaw(t, ln.Addr(), nil)
	p.Send(smbdpeer.NegotiateRequest{MinVersion: 0, MaxVersion: math.MaxUint16, CreditsRequested: math.MaxUint16,
		PreferredSendSize: math.MaxUint32, MaxReceiveSize: math.MaxUint32, MaxFragmentedSize: math.MaxUint32}.Append(nil))
	resp, err := smbdpeer.ParseNegotiateResponse(p.Receive())
	require.NoError(t, err)
	require.Equal(t, smbdpeer.StatusSuccess, resp.Status)
	require.EqualValues(t, s.cfg.MaxReceiveCredits, resp.CreditsGranted)
	require.EqualValues(t, plainSegment, resp.MaxReceiveSize)
	nc, err := ln.Accept()
	require.NoError(t, err)
	c := s.owned(nc)
	p.Grant(math.MaxUint16)
	_, err = c.Write(make([]byte, 20000))
	require.NoError(t, err)
	for n := 0; n < 20000; {
		_, payload, ok := p.ReceiveData()
		require.True(t, ok)
		n += len(payload)
	}
}

// Responses that Dial must not take.
func TestHostileResponses(t *testing.T) {
	for _, tt := range []struct {
		name string
		send []byte
		want error
	}{
		{"empty", nil, errResponseShort},
		{"short", goodResponse.Append(nil)[:smbdpeer.NegotiateResponseLen-1], errResponseShort},
		{"longer than the receive", append(goodResponse.Append(nil), make([]byte, pagedSegment)...), errTooLong},
		{"refusal", smbdpeer.Refusal(smbdpeer.StatusNotSupported).Append(nil), statusError(smbdpeer.StatusNotSupported)},
		{"unknown status", responseWith(func(m *smbdpeer.NegotiateResponse) { m.Status = 1 }), statusError(1)},
		{"version 0", responseWith(func(m *smbdpeer.NegotiateResponse) { m.NegotiatedVersion = 0 }), errNegotiated},
		{"version 2.0", responseWith(func(m *smbdpeer.NegotiateResponse) { m.NegotiatedVersion = 0x200 }), errNegotiated},
		{"no credits granted", responseWith(func(m *smbdpeer.NegotiateResponse) { m.CreditsGranted = 0 }), errCreditsGranted},
		{"no credits requested", responseWith(func(m *smbdpeer.NegotiateResponse) { m.CreditsRequested = 0 }), errCreditsRequested},
		{"receive size one too small", responseWith(func(m *smbdpeer.NegotiateResponse) { m.MaxReceiveSize = 127 }), errReceiveSize},
		{"fragmented size one too small", responseWith(func(m *smbdpeer.NegotiateResponse) { m.MaxFragmentedSize = 131071 }), errFragmentedSize},
		{"sends larger than we receive", responseWith(func(m *smbdpeer.NegotiateResponse) { m.PreferredSendSize = plainSegment + 1 }), errPreferredToSend},
		{"sends of 2^32-1", responseWith(func(m *smbdpeer.NegotiateResponse) { m.PreferredSendSize = math.MaxUint32 }), errPreferredToSend},
		{"data first", smbdpeer.Segment(100, 0), statusError(smbdpeer.PayloadOffset)}, // which stands where the status would
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newScene(t)
			ln := listenRaw(t)
			result := s.dial(ln)
			p := acceptRaw(t, ln)
			require.NoError(t, p.ID.Accept(tctx, ibv.ConnParam{}))
			require.Len(t, p.Receive(), smbdpeer.NegotiateRequestLen)
			p.Send(tt.send)
			r := <-result
			requireCause(t, r.err, tt.want)
			var op *net.OpError
			require.ErrorAs(t, r.err, &op)
			require.Equal(t, ln.Addr().String(), op.Addr.String())
			p.WaitEnd()
		})
	}
}

// A peer that connects and then says nothing is waited for no longer than
// NegotiateTimeout, on either side.
func TestSilentAfterConnect(t *testing.T) {
	bound := 30 * time.Millisecond
	if onRDMA {
		bound = time.Second
	}
	t.Run("accepted", func(t *testing.T) {
		inTime(t, bound, func(bound time.Duration) bool {
			s := newScene(t)
			good := s.cfg
			s.cfg.NegotiateTimeout = bound
			ln := s.listen()
			id, err := newProvider(t).Resolve(tctx, netip.AddrPort{}, ln.Addr().(*net.TCPAddr).AddrPort())
			require.NoError(t, err)
			p := newRaw(t, id)
			if id.Connect(tctx, rawParam(id, nil)) != nil {
				return false // the other side was gone before
			}
			var ne net.Error
			require.ErrorAs(t, s.logged(), &ne)
			require.True(t, ne.Timeout())
			p.WaitEnd()
			s.cfg = good
			s.exchange(s.listen())
			return true
		})
	})
	t.Run("dialled", func(t *testing.T) {
		inTime(t, bound, func(bound time.Duration) (connected bool) {
			s := newScene(t)
			s.cfg.NegotiateTimeout = bound
			ln := listenRaw(t)
			var r dialled
			asked, cancel := context.WithCancel(tctx)
			go func() {
				defer cancel()
				r = <-s.dial(ln)
			}()
			if id, err := ln.Accept(asked); err == nil {
				p, err := smbdpeer.TryRaw(t, id, patience)
				if connected = err == nil && id.Accept(tctx, ibv.ConnParam{}) == nil; connected {
					p.WaitEnd()
				}
			}
			<-asked.Done()
			var ne net.Error
			require.ErrorAs(t, r.err, &ne)
			require.True(t, ne.Timeout())
			return connected
		})
	})
	t.Run("dialled, no answer to the connection request", func(t *testing.T) {
		s := newScene(t)
		s.cfg.NegotiateTimeout = bound
		ln := listenRaw(t)
		r := <-s.dial(ln)
		var ne net.Error
		require.ErrorAs(t, r.err, &ne)
		require.True(t, ne.Timeout())
	})
}

// A peer that leaves at any step of set-up makes that connection fail, or end
// if it had come so far.
func TestLeavesDuringSetUp(t *testing.T) {
	leave := map[string]func(p *smbdpeer.Raw){
		"disconnects": func(p *smbdpeer.Raw) { p.ID.Disconnect(); p.WaitEnd() },
		"drops":       func(p *smbdpeer.Raw) { p.Close() },
	}
	for how, quit := range leave {
		t.Run("accepted/"+how, func(t *testing.T) {
			for _, step := range []struct {
				name string
				do   func(p *smbdpeer.Raw)
				up   bool // the listener hands the connection out
			}{
				{"once connected", func(p *smbdpeer.Raw) {}, false},
				{"inside the request", func(p *smbdpeer.Raw) { p.Send(goodRequest.Append(nil)[:10]) }, false},
				{"after the response", func(p *smbdpeer.Raw) { p.Negotiate(goodRequest) }, true},
				{"after the first grant", func(p *smbdpeer.Raw) { p.Negotiate(goodRequest); p.Grant(8) }, true},
			} {
				t.Run(step.name, func(t *testing.T) {
					s := newScene(t)
					ln := s.listen()
					p := dialRaw(t, ln.Addr(), nil)
					step.do(p)
					quit(p)
					if step.up {
						c, err := ln.Accept()
						require.NoError(t, err)
						_, err = io.ReadAll(s.owned(c))
						require.NoError(t, err) // a plain peer ends its stream so
						require.NoError(t, c.Close())
					} else {
						require.Error(t, s.logged())
					}
					s.exchange(ln)
				})
			}
		})
		t.Run("dialled/"+how, func(t *testing.T) {
			for _, step := range []struct {
				name string
				do   func(p *smbdpeer.Raw)
				up   bool
			}{
				{"once connected", func(p *smbdpeer.Raw) {}, false},
				{"after the request", func(p *smbdpeer.Raw) { p.Receive() }, false},
				{"inside the response", func(p *smbdpeer.Raw) { p.Receive(); p.Send(goodResponse.Append(nil)[:31]) }, false},
				{"after the first grant", func(p *smbdpeer.Raw) { p.Receive(); p.Send(goodResponse.Append(nil)); p.ReceiveData() }, true},
			} {
				t.Run(step.name, func(t *testing.T) {
					s := newScene(t)
					ln := listenRaw(t)
					result := s.dial(ln)
					p := acceptRaw(t, ln)
					require.NoError(t, p.ID.Accept(tctx, ibv.ConnParam{}))
					step.do(p)
					quit(p)
					r := <-result
					if !step.up {
						require.Error(t, r.err)
						return
					}
					require.NoError(t, r.err)
					_, err := io.ReadAll(s.owned(r.c))
					require.NoError(t, err)
				})
			}
		})
	}
	t.Run("dialled/refuses", func(t *testing.T) {
		s := newScene(t)
		ln := listenRaw(t)
		result := s.dial(ln)
		p := acceptRaw(t, ln)
		require.NoError(t, p.ID.Reject([]byte("no")))
		require.ErrorIs(t, (<-result).err, syscall.ECONNREFUSED)
	})
}

// A breach is what a peer sends on a connection that is up and must not.
type breach struct {
	name    string
	send    [][]byte
	want    error
	fin     bool // only a breach between rdmanet peers
	flags   bool // and only where the flags of messages were agreed
	payload int  // bytes that can be read before the error
	upTo    bool // or fewer: how many receives there are is a matter of time
	ended   bool // the stream has come to its end before the breach
}

func breaches() []breach {
	const limit = minFragmentedSize + 8
	seg := func(size int, offset, length, remaining uint32) []byte {
		return smbdpeer.DataTransfer{CreditsRequested: 16, DataOffset: offset, DataLength: length, RemainingDataLength: remaining}.Message(size)
	}
	flagged := func(flags uint16, n, rest int) []byte {
		b := smbdpeer.Segment(n, rest)
		b[4], b[5] = byte(flags), byte(flags>>8)
		return b
	}
	all := []breach{
		{name: "no bytes", send: [][]byte{nil}, want: errSegmentShort},
		{name: "one byte less than a header", send: [][]byte{smbdpeer.Segment(0, 0)[:smbdpeer.HeaderLen-1]}, want: errSegmentShort},
		{name: "longer than the receive", send: [][]byte{smbdpeer.Segment(agreedSendSize-smbdpeer.PayloadOffset+1, 0)}, want: errTooLong},
		{name: "no credits requested", send: [][]byte{smbdpeer.DataTransfer{CreditsGranted: 1}.Message(smbdpeer.HeaderLen)}, want: errCreditsRequested},
		{name: "offset misaligned", send: [][]byte{seg(100, 25, 10, 0)}, want: errOffsetAlignment},
		{name: "offset 4", send: [][]byte{seg(100, 20, 10, 0)}, want: errOffsetAlignment},
		{name: "offset 0", send: [][]byte{seg(100, 0, 10, 0)}, want: errOffsetInHeader},
		{name: "offset inside the header", send: [][]byte{seg(100, 16, 10, 0)}, want: errOffsetInHeader},
		{name: "offset behind the end", send: [][]byte{seg(100, 104, 1, 0)}, want: errDataBeyondEnd},
		{name: "offset 2^32-8", send: [][]byte{seg(100, math.MaxUint32-7, 8, 0)}, want: errDataBeyondEnd},
		{name: "length one past the end", send: [][]byte{seg(100, 24, 77, 0)}, want: errDataBeyondEnd},
		{name: "length past the receive", send: [][]byte{seg(agreedSendSize, 24, agreedSendSize, 0)}, want: errDataBeyondEnd},
		{name: "length 2^32-1", send: [][]byte{seg(100, 24, math.MaxUint32, 0)}, want: errDataBeyondEnd},
		{name: "message one byte over the limit", send: [][]byte{smbdpeer.Segment(100, limit-99)}, want: errMessageSize},
		{name: "remainder 2^32-1", send: [][]byte{seg(100, 24, 76, math.MaxUint32)}, want: errMessageSize},
		{name: "remainder 2^32-1 and no payload", send: [][]byte{seg(smbdpeer.HeaderLen, 0, 0, math.MaxUint32)}, want: errMessageSize},
		{name: "remainder grows", send: [][]byte{smbdpeer.Segment(10, 100), smbdpeer.Segment(10, 101)}, want: errRemaining, payload: 10},
		{name: "remainder stays", send: [][]byte{smbdpeer.Segment(10, 100), smbdpeer.Segment(10, 100)}, want: errRemaining, payload: 10},
		{name: "remainder jumps", send: [][]byte{smbdpeer.Segment(10, 100), smbdpeer.Segment(10, 50)}, want: errRemaining, payload: 10},
		{name: "remainder vanishes", send: [][]byte{smbdpeer.Segment(10, 100), smbdpeer.Segment(10, 0)}, want: errRemaining, payload: 10},
		{name: "more payload than remained", send: [][]byte{smbdpeer.Segment(10, 5), smbdpeer.Segment(6, 0)}, want: errDataBeyondRest, payload: 10},
		{name: "another Negotiate Request", send: [][]byte{goodRequest.Append(nil)}, want: errDataBeyondEnd},
		{name: "a Negotiate Response", send: [][]byte{goodResponse.Append(nil)}, want: errMessageSize},

		{name: "FIN inside a message", fin: true, send: [][]byte{flagged(smbdpeer.FlagFIN, 10, 5)}, want: errFINInMessage},
		{name: "FIN without payload inside a message", fin: true, payload: 10, want: errFINInMessage,
			send: [][]byte{smbdpeer.Segment(10, 5), smbdpeer.DataTransfer{CreditsRequested: 16, Flags: smbdpeer.FlagFIN}.Message(smbdpeer.HeaderLen)}},
		{name: "data after FIN", fin: true, ended: true, payload: 10, want: errDataAfterFIN,
			send: [][]byte{flagged(smbdpeer.FlagFIN, 10, 0), smbdpeer.Segment(10, 0)}},
		{name: "data after FIN in a message that goes on", fin: true, ended: true, want: errDataAfterFIN,
			send: [][]byte{smbdpeer.DataTransfer{CreditsRequested: 16, Flags: smbdpeer.FlagFIN}.Message(smbdpeer.HeaderLen), smbdpeer.Segment(10, 5)}},

		{name: "expedited inside a message", flags: true, payload: 10, want: errMessageFlags,
			send: [][]byte{smbdpeer.Segment(10, 5), flagged(smbdpeer.FlagExpedited, 5, 0)}},
		{name: "partial in the middle", flags: true, payload: 10, want: errMessageFlags,
			send: [][]byte{smbdpeer.Segment(10, 5), flagged(smbdpeer.FlagPartial, 5, 0)}},
		{name: "expedited between pieces", flags: true, payload: 10, want: errMessageInside,
			send: [][]byte{flagged(smbdpeer.FlagPartial, 10, 0), flagged(smbdpeer.FlagExpedited, 5, 0)}},
		{name: "normal between expedited pieces", flags: true, payload: 10, want: errMessageInside,
			send: [][]byte{flagged(smbdpeer.FlagPartial|smbdpeer.FlagExpedited, 10, 0), smbdpeer.Segment(5, 0)}},
		{name: "empty message between expedited pieces", flags: true, payload: 10, want: errMessageInside,
			send: [][]byte{flagged(smbdpeer.FlagPartial|smbdpeer.FlagExpedited, 10, 0), emptyMessage(0)}},
		{name: "empty message with payload", flags: true, want: errEmptyFlag, send: [][]byte{flagged(smbdpeer.FlagEmptyMessage, 10, 0)}},
		{name: "empty message inside one", flags: true, payload: 10, want: errRemaining,
			send: [][]byte{smbdpeer.Segment(10, 5), emptyMessage(0)}},
		{name: "empty message after FIN", flags: true, ended: true, want: errDataAfterFIN,
			send: [][]byte{smbdpeer.DataTransfer{CreditsRequested: 16, Flags: smbdpeer.FlagFIN}.Message(smbdpeer.HeaderLen), emptyMessage(0)}},
		{name: "FIN with a piece", flags: true, want: errFINInMessage, send: [][]byte{flagged(smbdpeer.FlagFIN|smbdpeer.FlagPartial, 10, 0)}},
		{name: "FIN between pieces", flags: true, payload: 10, want: errFINInMessage,
			send: [][]byte{flagged(smbdpeer.FlagPartial, 10, 0), smbdpeer.DataTransfer{CreditsRequested: 16, Flags: smbdpeer.FlagFIN}.Message(smbdpeer.HeaderLen)}},
	}
	if !onRDMA { // see TestMessagesWithoutReceives
		all = append(all, breach{name: "more messages than credits", send: moreThanCredits, payload: 4 * 600, upTo: true, want: errUngranted})
	}
	return all
}

// emptyMessage is a message of the upper layer without payload.
func emptyMessage(flags uint16) []byte {
	return smbdpeer.DataTransfer{CreditsRequested: 16, CreditsGranted: 1, Flags: smbdpeer.FlagEmptyMessage | flags}.Message(smbdpeer.HeaderLen)
}

// moreThanCredits is one message more than a scene's connections grant.
var moreThanCredits = [][]byte{smbdpeer.Segment(600, 0), smbdpeer.Segment(600, 0), smbdpeer.Segment(600, 0), smbdpeer.Segment(600, 0), smbdpeer.Segment(600, 0)}

// To RDMA devices a message for which there is no receive is no error that they
// would tell of. Soft-iWARP ends the connection; InfiniBand has the message wait
// until it is allowed, or is found out.
func TestMessagesWithoutReceives(t *testing.T) {
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			s := newScene(t)
			c, p := s.conns(side.active, nil)
			for _, m := range moreThanCredits {
				p.Send(m)
			}
			if !onRDMA {
				p.WaitEnd() // before a Read makes room for what is still on its way
			}
			n, err := io.ReadFull(c, make([]byte, 600*len(moreThanCredits)))
			require.Zero(t, n%600)
			if err == nil {
				require.True(t, onRDMA, "the software device lets it pass")
				return
			}
			require.True(t, err == io.EOF || err == io.ErrUnexpectedEOF || errors.Is(err, syscall.ECONNRESET), "%v", err)
			p.WaitEnd()
		})
	}
}

// private is the private data of a peer that commits the breach.
func (b *breach) private() []byte {
	switch {
	case b.flags:
		return messagesPrivate
	case b.fin:
		return rdmanetPrivate
	}
	return nil
}

// inflict has the peer commit the breach and checks what comes of it.
func (b *breach) inflict(s *scene, c *Conn, p *smbdpeer.Raw) {
	t := s.t
	t.Helper()
	for _, m := range b.send {
		p.Send(m)
	}
	p.WaitEnd()
	requireCause(t, s.logged(), b.want)

	got, err := io.ReadAll(c)
	if b.upTo {
		require.LessOrEqual(t, len(got), b.payload)
	} else {
		require.Equal(t, b.payload, len(got))
	}
	if b.ended {
		require.NoError(t, err)
	} else {
		requireCause(t, err, b.want)
		require.ErrorIs(t, err, syscall.ECONNRESET)
		var op *net.OpError
		require.ErrorAs(t, err, &op)
		require.Equal(t, "read", op.Op)
	}
	_, err = c.Write([]byte("x"))
	requireCause(t, err, b.want)
	require.NoError(t, c.Close())
	require.Empty(t, s.errs, "one error, once")
}

func TestBreaches(t *testing.T) {
	for _, side := range sides {
		for _, b := range breaches() {
			t.Run(side.name+"/"+b.name, func(t *testing.T) {
				s := newScene(t)
				c, p := s.conns(side.active, b.private())
				b.inflict(s, c, p)
			})
			if b.fin && (side.active || negotiatesEarly(t)) {
				t.Run(side.name+"/early/"+b.name, func(t *testing.T) {
					s := newScene(t)
					c, p := s.earlyConns(side.active)
					b.inflict(s, c, p)
				})
			}
		}
	}
}

// goodOnes is how many connections there are beside each bad peer.
func goodOnes() int {
	if onRDMA {
		return 3
	}
	return 100
}

// What bad peers do to their own connections on a listener does nothing to the
// good ones beside them.
func TestBadPeersBesideGoodOnes(t *testing.T) {
	s := newScene(t)
	ln := s.listen()
	var clients, servers []*Conn
	d := Dialer{Config: s.cfg}
	for range goodOnes() {
		client, err := d.Dial("rdma", ln.Addr().String())
		require.NoError(t, err)
		server, err := ln.Accept()
		require.NoError(t, err)
		clients, servers = append(clients, s.owned(client)), append(servers, s.owned(server))
	}
	for _, b := range breaches() {
		p := dialRaw(t, ln.Addr(), b.private())
		p.Negotiate(goodRequest)
		c, err := ln.Accept()
		require.NoError(t, err)
		b.inflict(s, s.owned(c), p)
		for i := range clients {
			pass(t, clients[i], servers[i])
			pass(t, servers[i], clients[i])
		}
	}
	for i := range clients {
		require.NoError(t, clients[i].CloseWrite())
		_, err := io.ReadAll(servers[i])
		require.NoError(t, err)
	}
}

// A message for which a receive happens to be posted is one too many as long as
// the peer has not been granted it.
func TestMessageWithoutCredit(t *testing.T) {
	s := newScene(t)
	ln := s.listen()
	p := dialRaw(t, ln.Addr(), nil)
	p.Negotiate(goodRequest)
	nc, err := ln.Accept()
	require.NoError(t, err)
	c := s.owned(nc)
	// Without credits of its own the connection cannot grant anything.
	for n := range p.Credits {
		p.Grant(0)
		require.True(t, eventually(func() bool { return c.Stats().EmptyReceived == uint64(n+1) }))
	}
	require.Positive(t, c.Stats().ReceiveCredits)
	p.Grant(0)
	p.WaitEnd()
	require.ErrorIs(t, s.logged(), errNoCredit)
	_, err = c.Read(make([]byte, 1))
	require.ErrorIs(t, err, errNoCredit)
}

// A connection that comes in while the listener is being closed is not waited
// for.
func TestAdmitAfterClose(t *testing.T) {
	s := newScene(t)
	ln := s.listen()
	require.NoError(t, ln.Close())
	ctx, cancel := context.WithCancel(tctx)
	defer cancel()
	ln.admit(cancel)
	require.ErrorIs(t, ctx.Err(), context.Canceled)
}

// Grants that add up to more than their count can say are taken as far as it
// goes.
func TestCreditsOverflow(t *testing.T) {
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			s := newScene(t)
			c, p := s.conns(side.active, nil)
			for range 20 {
				p.WaitCredit()
				p.Grant(math.MaxUint16)
			}
			p.WaitCredit()
			p.Payload(1)
			_, err := c.Read(make([]byte, 1))
			require.NoError(t, err)
			require.LessOrEqual(t, c.Stats().SendCredits, math.MaxUint16)
			require.Greater(t, c.Stats().SendCredits, math.MaxUint16-100)
			_, err = c.Write([]byte("x"))
			require.NoError(t, err)
			for {
				_, payload, ok := p.ReceiveData()
				require.True(t, ok)
				if len(payload) > 0 {
					break
				}
			}
		})
	}
}

// Without credits a Write ends at its deadline, and Close after LingerTimeout.
func TestNoCreditsEver(t *testing.T) {
	for _, tt := range []struct {
		name    string
		private []byte
	}{{"plain", nil}, {"rdmanet", rdmanetPrivate}} {
		t.Run(tt.name, func(t *testing.T) {
			s := newScene(t)
			s.cfg.LingerTimeout = 50 * time.Millisecond
			ln := s.listen()
			p := dialRaw(t, ln.Addr(), tt.private)
			p.Negotiate(goodRequest) // after this it is for the peer to grant
			nc, err := ln.Accept()
			require.NoError(t, err)
			c := s.owned(nc)

			c.SetWriteDeadline(time.Now().Add(20 * time.Millisecond))
			n, err := c.Write(make([]byte, c.Info().MaxSendSize))
			require.Zero(t, n)
			require.ErrorIs(t, err, os.ErrDeadlineExceeded)
			var ne net.Error
			require.True(t, errors.As(err, &ne) && ne.Timeout())

			// The stream goes on where it was.
			p.Payload(10)
			_, err = io.ReadFull(c, make([]byte, 10))
			require.NoError(t, err)

			within(t, "Close", func() { err = c.Close() })
			require.NoError(t, err)
			p.WaitEnd()
		})
	}
}

// A Write that waits for credits ends when the peer goes.
func TestPeerLeavesWithoutCredits(t *testing.T) {
	s := newScene(t)
	ln := s.listen()
	p := dialRaw(t, ln.Addr(), rdmanetPrivate)
	p.Negotiate(goodRequest)
	nc, err := ln.Accept()
	require.NoError(t, err)
	c := s.owned(nc)
	wrote := make(chan error, 1)
	go func() {
		_, err := c.Write(make([]byte, 100_000)) // More than waits for credits behind Write.
		wrote <- err
	}()
	p.Close()
	require.ErrorIs(t, <-wrote, syscall.EPIPE)
	_, err = c.Read(make([]byte, 1))
	require.ErrorIs(t, err, errTruncated)
}

// A peer that asks for an answer with every message gets one at most for each,
// and the connection goes on.
func TestProbeFlood(t *testing.T) {
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			s := newScene(t)
			c, p := s.conns(side.active, nil)
			const probes = 300
			for range probes {
				p.WaitCredit()
				p.Credits--
				p.Send(smbdpeer.DataTransfer{CreditsRequested: 16, CreditsGranted: 1, Flags: smbdpeer.FlagResponseRequested}.Message(smbdpeer.HeaderLen))
			}
			p.WaitCredit()
			p.Payload(10)
			_, err := io.ReadFull(c, make([]byte, 10))
			require.NoError(t, err)
			require.LessOrEqual(t, c.Stats().EmptySent, uint64(probes+10))
			_, err = c.Write([]byte("x"))
			require.NoError(t, err)
			for {
				_, payload, ok := p.ReceiveData()
				require.True(t, ok)
				if len(payload) > 0 {
					break
				}
			}
		})
	}
}

// A peer that falls silent is asked for a sign of life and then given up. It can be
// asked by a message when it has granted credits for one.
func TestSilentPeer(t *testing.T) {
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			inTime(t, 200*time.Millisecond, func(keepAlive time.Duration) (asked bool) {
				s := newScene(t)
				s.cfg.KeepAlive = keepAlive
				c, p := s.conns(side.active, nil)
				_, err := c.Read(make([]byte, 1))
				require.ErrorIs(t, err, syscall.ETIMEDOUT)
				require.NoError(t, c.Close())
				for {
					h, _, ok := p.ReceiveData()
					if !ok {
						return asked
					}
					asked = asked || h.Flags&smbdpeer.FlagResponseRequested != 0
				}
			})
		})
	}
}

// A peer of plain SMB Direct never meets an extension.
func TestPlainPeer(t *testing.T) {
	for _, side := range sides {
		t.Run(side.name, func(t *testing.T) {
			for _, tt := range []struct {
				name    string
				private []byte
			}{
				{"no private data", nil},
				{"depths only", smbdpeer.PrivateData{IRD: 16, ORD: 16}.Append(nil)},
				{"private data of another kind", []byte("0123456789abcdefghijklmnopqrstuvwxyz")},
			} {
				t.Run(tt.name, func(t *testing.T) {
					s := newScene(t)
					s.cfg.InitialReceiveCredits, s.cfg.MaxReceiveCredits = 0, 0
					c, p := s.conns(side.active, tt.private)
					require.Zero(t, c.Info().Extensions)
					require.LessOrEqual(t, c.Info().MaxSendSize, plainSegment)
					require.LessOrEqual(t, c.Info().MaxReceiveSize, plainSegment)
					require.ErrorIs(t, c.CloseWrite(), errors.ErrUnsupported)

					// The flags that mean something elsewhere do not here.
					p.Credits--
					b := smbdpeer.Segment(10, 0)
					b[5] = byte((smbdpeer.FlagFIN | smbdpeer.FlagExpedited | smbdpeer.FlagPartial | smbdpeer.FlagEmptyMessage | smbdpeer.FlagNoResponse) >> 8)
					p.Send(b)
					require.Zero(t, c.Info().Extensions)
					_, err := c.WriteMsg([]byte("piece"), Partial)
					require.ErrorIs(t, err, errors.ErrUnsupported)
					_, err = c.QueueMsg([]byte("piece"), Partial|Expedited).Result()
					require.ErrorIs(t, err, errors.ErrUnsupported)
					p.Payload(10)
					got, flags := make([]byte, 20), MsgFlags(0)
					_, flags, err = c.ReadPiece(got)
					require.NoError(t, err)
					require.Zero(t, flags)
					_, err = io.ReadFull(c, got[:10])
					require.NoError(t, err)

					const total = 100000
					wrote := make(chan error, 1)
					go func() {
						_, err := c.WriteMsg(make([]byte, total/2), Expedited|NoResponse)
						_, err2 := c.WriteMsg(nil, Expedited) // forces flow, and is nothing to the peer
						_, err3 := c.Write(make([]byte, total/2))
						wrote <- errors.Join(err, err2, err3, c.Close())
					}()
					owed := uint16(0)
					for n := 0; n < total; {
						h, payload, ok := p.ReceiveData()
						require.True(t, ok)
						require.Zero(t, h.Flags&^smbdpeer.FlagResponseRequested)
						require.LessOrEqual(t, smbdpeer.PayloadOffset+len(payload), plainSegment)
						n += len(payload)
						owed++
						if p.Credits > 0 {
							p.Grant(owed)
							owed = 0
						}
					}
					for {
						h, _, ok := p.ReceiveData()
						if !ok {
							break
						}
						require.Zero(t, h.Flags)
					}
					require.NoError(t, <-wrote)
				})
			}
		})
	}
}

// The sizes offered to a plain peer are those that all known ones take.
func TestPlainOffer(t *testing.T) {
	s := newScene(t)
	ln := listenRaw(t)
	result := s.dial(ln)
	p := acceptRaw(t, ln)
	require.NoError(t, p.ID.Accept(tctx, ibv.ConnParam{}))
	req, err := smbdpeer.ParseNegotiateRequest(p.Receive())
	require.NoError(t, err)
	require.LessOrEqual(t, req.PreferredSendSize, uint32(plainSegment))
	require.LessOrEqual(t, req.MaxReceiveSize, uint32(plainSegment))
	p.Close()
	require.Error(t, (<-result).err)

	l := s.listen()
	resp := dialRaw(t, l.Addr(), nil).Negotiate(goodRequest)
	require.LessOrEqual(t, resp.PreferredSendSize, uint32(plainSegment))
	require.LessOrEqual(t, resp.MaxReceiveSize, uint32(plainSegment))
}
