package rdmanet

import (
	"io"
	"math"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/smbdpeer"
)

// Two ends that negotiate early need no message for it, nor for the first
// grant: either may speak at once.
func TestEarlyNegotiation(t *testing.T) {
	early := negotiatesEarly(t)
	for _, lb := range loopbacks {
		for _, first := range []string{"client", "server"} {
			t.Run(lb.network+"/"+first, func(t *testing.T) {
				checkLeaks(t)
				ln, err := Listen(lb.network, lb.address)
				require.NoError(t, err)
				defer ln.Close()
				nc, err := Dial(lb.network, ln.Addr().String())
				require.NoError(t, err)
				client := nc.(*Conn)
				nc, err = ln.Accept()
				require.NoError(t, err)
				server := nc.(*Conn)
				for _, c := range []*Conn{client, server} {
					st := c.Stats()
					if early {
						require.Zero(t, st.SegmentsSent+st.EmptySent)
						require.Equal(t, st.ReceiveWindow, st.SendCredits) // which is the initial one, at both ends
					}
				}
				from, to := client, server
				if first == "server" {
					from, to = to, from
				}
				pass(t, from, to)
				if early {
					require.Zero(t, from.Stats().EmptyReceived)
				}
				pass(t, to, from)
				require.NoError(t, client.Close())
				require.NoError(t, server.Close())
			})
		}
	}
}

// Where the passive side may not send first, the active side's first message has
// the grant, after a negotiation by messages.
func TestNoEarlyNegotiation(t *testing.T) {
	checkLeaks(t)
	dev := newModest(t, 1<<20, 1<<14, false)
	dev.shy = true
	client, server := pipeOn(t, Config{Provider: dev})
	st := server.Stats()
	require.True(t, st.SendCredits == 0 || st.EmptyReceived > 0, "%+v", st)
	pass(t, client, server)
	pass(t, server, client)
	require.NoError(t, client.Close())
	require.NoError(t, server.Close())
}

// Two programs that have left much unread stay silent: grants do not call for
// grants.
func TestUnreadSilence(t *testing.T) {
	checkLeaks(t)
	a, b := pipeOn(t, withCredits(t, Config{MaxReceiveCredits: minCredits, TransferSize: -1}))
	for _, c := range []*Conn{a, b} {
		go c.Write(make([]byte, 4<<20))
		require.True(t, eventually(func() bool { return c.Stats().CreditStalls > 0 }))
	}
	for i := range 20 { // a different number of unread segments each time
		errs := make(chan error, 2)
		for _, c := range []*Conn{a, b} {
			go func() {
				errs <- defect.ReadFull(c, make([]byte, 1+i*9999))
			}()
		}
		within(t, "reads", func() {
			require.NoError(t, <-errs)
			require.NoError(t, <-errs)
		})
		sent := func() uint64 { return a.Stats().EmptySent + b.Stats().EmptySent }
		var before uint64
		require.True(t, eventually(func() bool {
			before = sent()
			time.Sleep(5 * time.Millisecond)
			return sent() == before
		}), "they never stop")
	}
	require.NoError(t, a.Close())
	require.NoError(t, b.Close())
}

// A request in the private data that is no good counts for nothing: the peer
// has to come with a message, and hears there what is wrong with it.
func TestHostileEarlyRequests(t *testing.T) {
	padded := !overIWARP(t) // with zeros, so that a request cut short is whole again
	bad := goodRequest
	bad.MinVersion, bad.MaxVersion = 0x200, 0x200
	poor := goodRequest
	poor.CreditsRequested = 0
	for _, tt := range []struct {
		name    string
		private []byte
	}{
		{"nothing", earlyPrivate(nil)},
		{"short", earlyPrivate(goodRequest.Append(nil))},
		{"zeros", earlyPrivate(make([]byte, 36))},
		{"version", earlyPrivate(append(bad.Append(nil), wireGrant(8)...))},
		{"no credits", earlyPrivate(append(poor.Append(nil), wireGrant(8)...))},
		{"not announced", append(rdmanetPrivate[:smbdpeer.PrivateLen:smbdpeer.PrivateLen], append(goodRequest.Append(nil), wireGrant(8)...)...)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newScene(t)
			ln := s.listen()
			p := dialRaw(t, ln.Addr(), tt.private)
			_, answered := smbdpeer.EarlyResponse(p.ID.PrivateData())
			if padded && tt.name == "short" {
				require.True(t, answered, "a request with a grant of none")
				return
			}
			require.False(t, answered)
			p.Negotiate(goodRequest)
			nc, err := ln.Accept()
			require.NoError(t, err)
			p.Grant(8)
			pass2(t, s.owned(nc), p)

			p = dialRaw(t, ln.Addr(), tt.private)
			p.Send(bad.Append(nil))
			require.ErrorIs(t, s.logged(), errVersion)
			p.WaitEnd()
			s.exchange(ln)
		})
	}
}

// pass2 has the connection say something that the peer hears.
func pass2(t *testing.T, c *Conn, p *smbdpeer.Raw) {
	t.Helper()
	_, err := io.WriteString(c, "hello")
	require.NoError(t, err)
	for {
		_, payload, ok := p.ReceiveData()
		require.True(t, ok)
		if len(payload) > 0 {
			require.Equal(t, "hello", string(payload))
			return
		}
	}
}

// Grants of any size may come with a request, and a second request is no
// Data Transfer message.
func TestEarlyGrants(t *testing.T) {
	if !negotiatesEarly(t) {
		return // grants come with messages only
	}
	for _, granted := range []uint16{0, 1, math.MaxUint16} {
		s := newScene(t)
		ln := s.listen()
		p := dialRaw(t, ln.Addr(), earlyPrivate(append(goodRequest.Append(nil), wireGrant(granted)...)))
		_, answered := smbdpeer.EarlyResponse(p.ID.PrivateData())
		require.True(t, answered)
		p.Credits = int(goodResponse.CreditsGranted)
		nc, err := ln.Accept()
		require.NoError(t, err)
		c := s.owned(nc)
		require.EqualValues(t, granted, c.Stats().SendCredits)
		if granted < 3 {
			p.Grant(8)
		}
		pass2(t, c, p)
		p.Send(goodRequest.Append(nil))
		p.WaitEnd()
		_, err = io.ReadAll(c)
		var protocol *protocolError
		require.ErrorAs(t, err, &protocol)
		s.exchange(ln)
	}
}

// Responses in the private data are checked like those that come as messages;
// without one the request goes out as a message.
func TestHostileEarlyResponses(t *testing.T) {
	for _, tt := range []struct {
		name string
		send []byte
		want error
	}{
		{"short", goodResponse.Append(nil)[:smbdpeer.NegotiateResponseLen-1], nil},
		{"nothing", nil, nil},
		{"zeros", make([]byte, smbdpeer.NegotiateResponseLen), errNegotiated},
		{"refusal", smbdpeer.Refusal(smbdpeer.StatusNotSupported).Append(nil), statusError(smbdpeer.StatusNotSupported)},
		{"no credits granted", responseWith(func(m *smbdpeer.NegotiateResponse) { m.CreditsGranted = 0 }), errCreditsGranted},
		{"sends of 2^32-1", responseWith(func(m *smbdpeer.NegotiateResponse) { m.PreferredSendSize = math.MaxUint32 }), errPreferredToSend},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newScene(t)
			ln := listenRaw(t)
			result := s.dial(ln)
			p := acceptRaw(t, ln)
			require.NoError(t, p.ID.Accept(tctx, ibv.ConnParam{Private: earlyPrivate(tt.send)}))
			if !overIWARP(t) { // the private data is padded with zeros
				switch tt.name {
				case "short":
					r := <-result
					require.NoError(t, r.err) // it was a whole one
					pass2(t, s.owned(r.c), p)
					return
				case "nothing":
					tt.want = errNegotiated
				}
			}
			if tt.want == nil {
				p.Respond(goodResponse)
				r := <-result
				require.NoError(t, r.err)
				p.WaitCredit()
				pass2(t, s.owned(r.c), p)
				return
			}
			r := <-result
			require.ErrorIs(t, r.err, tt.want)
			var op *net.OpError
			require.ErrorAs(t, r.err, &op)
			p.WaitEnd()
		})
	}
}

// A message longer than agreed breaks the connection, even where the receive was
// posted before the agreement and has room for it.
func TestEarlyTooLong(t *testing.T) {
	s := newScene(t)
	c, p := s.earlyConns(true)
	p.Send(smbdpeer.Segment(agreedSendSize, 0)) // 24 bytes more than were agreed on
	p.WaitEnd()
	_, err := io.ReadAll(c)
	requireCause(t, err, errTooLong)
}
