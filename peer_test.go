package rdmanet

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/fabric"
	"github.com/rdmanet/rdmanet/internal/leaktest"
	"github.com/rdmanet/rdmanet/internal/scripted"
	"github.com/rdmanet/rdmanet/internal/smbdpeer"
)

// A scene is what tests against a raw peer have in common: a device on which nothing may be
// left, and the log of what went wrong.
type scene struct {
	t      testing.TB
	cfg    Config
	device *verbstest.Switch
	script *scripted.Provider // steers the device
	peers  ibv.Provider       // the raw peers' device
	errs   chan error         // logged
}

func newScene(t testing.TB) *scene { return newSceneOn(t, nil) }

// newSceneOn is newScene on a device of choice, which a scripted provider steers.
func newSceneOn(t testing.TB, p ibv.Provider) *scene {
	t.Helper()
	leaktest.Check(t)
	s := &scene{t: t, peers: newProvider(t), errs: make(chan error, 1000)}
	switch d := p.(type) {
	case *scripted.Provider:
		s.script = d
	case *modest:
		s.script = d.script
	case nil:
		s.script = scripted.New(s.peers)
		p = s.script
	default:
		s.script = scripted.New(p)
		p = s.script
	}
	s.device = newSwitch(t, p)
	s.cfg = Config{
		Provider:              s.device,
		Logger:                slog.New(errorLog{slog.DiscardHandler, s.errs}),
		InitialReceiveCredits: 4,
		MaxReceiveCredits:     4,
		MaxFragmentedSize:     minFragmentedSize + 8,
	}
	return s
}

// newFabricScene is newScene on the device in memory, which needs no descriptors: for tests in
// virtual time.
func newFabricScene(t testing.TB) *scene {
	t.Helper()
	f := newMemoryFabric()
	s := newSceneOn(t, f)
	s.peers = f
	return s
}

func newMemoryFabric() *fabric.Fabric { return fabric.New(4096, netip.MustParseAddr(host4)) }

// end is the verbs of a connection of the scene.
func (s *scene) end(c *Conn) *scripted.Endpoint { return s.script.Endpoint(c.Info().QPN) }

// together has f send n messages to c, and has all of them arrive at once: c handles them
// before any of its calls goes on.
func (s *scene) together(c *Conn, n int, f func()) {
	s.t.Helper()
	e := s.end(c)
	received := func(wc *ibv.WC) bool { return !e.IsSend(wc) }
	e.Hold(received)
	f()
	require.True(s.t, eventually(func() bool { return e.Held(received) == n }), "%d of %d messages have come", e.Held(received), n)
	e.Hold(nil)
	require.True(s.t, eventually(func() bool { return e.Held(received) == 0 }))
}

// errorLog hands on the errors that are logged.
type errorLog struct {
	slog.Handler
	errs chan<- error
}

func (l errorLog) Enabled(context.Context, slog.Level) bool { return true }

func (l errorLog) Handle(_ context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		if err, ok := a.Value.Any().(error); ok {
			l.errs <- err
		}
		return true
	})
	return nil
}

// logged waits for the next error in the log.
func (s *scene) logged() error {
	s.t.Helper()
	select {
	case err := <-s.errs:
		return err
	case <-time.After(patience):
		require.FailNow(s.t, "nothing was logged")
		return nil
	}
}

// listen makes a listener that ends with the test.
func (s *scene) listen() *Listener {
	s.t.Helper()
	ln, err := (&ListenConfig{Config: s.cfg}).Listen(tctx, "rdma4", local4)
	require.NoError(s.t, err)
	ln.(*Listener).SetDeadline(time.Now().Add(patience))
	s.t.Cleanup(func() { ln.Close() })
	return ln.(*Listener)
}

// newRaw makes a peer of the test's for a connection that has not been made yet.
func newRaw(t testing.TB, id ibv.ID) *smbdpeer.Raw {
	t.Helper()
	return smbdpeer.NewRaw(t, id, patience)
}

// rdmanetPrivate is the private data of a peer that knows half-close.
var rdmanetPrivate = smbdpeer.PrivateData{Rdmanet: true, Features: smbdpeer.FeatureFIN, MaxReceiveSize: 8136}.Append(nil)

// messagesPrivate is the private data of a peer that knows half-close, the flags of messages and
// large receives.
var messagesPrivate = smbdpeer.PrivateData{Rdmanet: true, Features: smbdpeer.FeatureFIN | smbdpeer.FeatureMessages | smbdpeer.FeatureLarge, MaxReceiveSize: 8136}.Append(nil)

// rawParam is what a raw peer connects with. It has as many RDMA Reads at a time as its private
// data says.
func rawParam(id ibv.ID, private []byte) ibv.ConnParam {
	attr, said := id.Device().Attr(), smbdpeer.ParsePrivateData(private)
	return ibv.ConnParam{Private: private, ResponderResources: min(int(said.IRD), attr.MaxQPRdAtom),
		InitiatorDepth: min(int(said.ORD), attr.MaxQPInitRdAtom)}
}

// earlyPrivate is the private data of a peer that negotiates early. msg goes with it: a request
// with a grant, or a response.
func earlyPrivate(msg []byte) []byte {
	return append(smbdpeer.PrivateData{Rdmanet: true, Features: smbdpeer.FeatureFIN | smbdpeer.FeatureEarly, MaxReceiveSize: 8136}.Append(nil), msg...)
}

// wireGrant is the grant behind an early request.
func wireGrant(n uint16) []byte { return binary.LittleEndian.AppendUint16(nil, n) }

// What a raw peer negotiates with, unless a test says otherwise.
var (
	goodRequest = smbdpeer.NegotiateRequest{MinVersion: smbdpeer.Version, MaxVersion: smbdpeer.Version, CreditsRequested: 16,
		PreferredSendSize: 1024, MaxReceiveSize: 8192, MaxFragmentedSize: 1 << 20}
	goodResponse = smbdpeer.NegotiateResponse{MinVersion: smbdpeer.Version, MaxVersion: smbdpeer.Version, NegotiatedVersion: smbdpeer.Version,
		CreditsRequested: 16, CreditsGranted: 8, PreferredSendSize: 1024, MaxReceiveSize: 8192, MaxFragmentedSize: 1 << 20}
)

// agreedSendSize is the size of a Send that is agreed on with goodRequest or goodResponse.
const agreedSendSize = 1024

// responseWith is goodResponse but for one change.
func responseWith(change func(m *smbdpeer.NegotiateResponse)) []byte {
	m := goodResponse
	change(&m)
	return m.Append(nil)
}

// dialRaw connects to a listener, up to negotiation.
func dialRaw(t testing.TB, addr net.Addr, private []byte) *smbdpeer.Raw {
	t.Helper()
	return dialRawOn(t, newProvider(t), addr, func(*smbdpeer.Raw) []byte { return private })
}

// dialRawOn is dialRaw on a device of choice, with private data that may tell of the peer's
// memory.
func dialRawOn(t testing.TB, device ibv.Provider, addr net.Addr, say func(p *smbdpeer.Raw) []byte) *smbdpeer.Raw {
	t.Helper()
	for attempt := 1; ; attempt++ {
		id, err := device.Resolve(tctx, netip.AddrPort{}, addr.(*net.TCPAddr).AddrPort())
		require.NoError(t, err)
		p := newRaw(t, id)
		private := say(p)
		param := rawParam(id, private)
		if smbdpeer.ParsePrivateData(private).Features&smbdpeer.FeatureTransfer == 0 {
			param.ResponderResources, param.InitiatorDepth = 1, 1
		}
		err = id.Connect(tctx, param)
		if err != nil && attempt < portTries && portTaken(err) {
			p.Close()
			continue
		}
		require.NoError(t, err)
		return p
	}
}

// listenRaw makes a listener for connections that a raw peer accepts.
func listenRaw(t testing.TB) ibv.Listener {
	t.Helper()
	return listenRawOn(t, newProvider(t))
}

func listenRawOn(t testing.TB, device ibv.Provider) ibv.Listener {
	t.Helper()
	local := netip.MustParseAddrPort(local4)
	var ln ibv.Listener
	require.NoError(t, onFreePort(local, func() (err error) {
		ln, err = device.Listen(tctx, local, 0)
		return err
	}))
	t.Cleanup(func() { ln.Close() })
	return ln
}

// acceptRaw takes the next connection request, and does not answer it.
func acceptRaw(t testing.TB, ln ibv.Listener) *smbdpeer.Raw {
	t.Helper()
	ctx, cancel := context.WithTimeout(tctx, patience)
	defer cancel()
	id, err := ln.Accept(ctx)
	require.NoError(t, err)
	return newRaw(t, id)
}

// dial starts to dial a raw peer.
func (s *scene) dial(ln ibv.Listener) (result chan dialled) {
	result = make(chan dialled, 1)
	d := Dialer{Config: s.cfg}
	go func() {
		c, err := d.Dial("rdma", ln.Addr().String())
		result <- dialled{c, err}
	}()
	return result
}

type dialled struct {
	c   net.Conn
	err error
}

// earlyConns is conns with a peer that negotiates early.
func (s *scene) earlyConns(active bool) (*Conn, *smbdpeer.Raw) {
	t := s.t
	t.Helper()
	if active {
		ln := listenRaw(t)
		result := s.dial(ln)
		p := acceptRaw(t, ln)
		_, granted, ok := smbdpeer.EarlyRequest(p.ID.PrivateData())
		require.True(t, ok)
		p.Credits = int(granted)
		require.NoError(t, p.ID.Accept(tctx, ibv.ConnParam{Private: earlyPrivate(goodResponse.Append(nil))}))
		r := <-result
		require.NoError(t, r.err)
		return s.owned(r.c), p
	}
	ln := s.listen()
	p := dialRaw(t, ln.Addr(), earlyPrivate(append(goodRequest.Append(nil), wireGrant(goodResponse.CreditsGranted)...)))
	resp, ok := smbdpeer.EarlyResponse(p.ID.PrivateData())
	require.True(t, ok)
	p.Credits = int(resp.CreditsGranted)
	c, err := ln.Accept()
	require.NoError(t, err)
	return s.owned(c), p
}

// conns makes a connection to a raw peer, with the connection under test on the active or the
// passive side. The peer has credits, and has granted those of goodResponse.
func (s *scene) conns(active bool, private []byte) (*Conn, *smbdpeer.Raw) {
	s.t.Helper()
	return s.connsWith(active, func(*smbdpeer.Raw) []byte { return private })
}

// connsWith is conns with private data that may tell of the peer's memory.
func (s *scene) connsWith(active bool, private func(p *smbdpeer.Raw) []byte) (*Conn, *smbdpeer.Raw) {
	t := s.t
	t.Helper()
	if active {
		ln := listenRawOn(t, s.peers)
		result := s.dial(ln)
		p := acceptRaw(t, ln)
		require.NoError(t, p.ID.Accept(tctx, rawParam(p.ID, private(p))))
		p.Respond(goodResponse)
		r := <-result
		require.NoError(t, r.err)
		p.WaitCredit()
		return s.owned(r.c), p
	}
	ln := s.listen()
	p := dialRawOn(t, s.peers, ln.Addr(), private)
	p.Negotiate(goodRequest)
	nc, err := ln.Accept()
	require.NoError(t, err)
	c := s.owned(nc)
	p.Grant(goodResponse.CreditsGranted)
	require.True(t, eventually(func() bool { return c.Stats().EmptyReceived > 0 }))
	return c, p
}

func (s *scene) owned(c net.Conn) *Conn {
	s.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	return c.(*Conn)
}

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

// arriving is what b reads until the end of the stream.
func arriving(b io.Reader) chan []byte {
	all := make(chan []byte, 1)
	go func() {
		got, err := io.ReadAll(b)
		if err != nil {
			got = append(got, err.Error()...)
		}
		all <- got
	}()
	return all
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

// plain is a result without the operation in its error.
func plain(r result) result {
	var op *net.OpError
	if errors.As(r.err, &op) {
		r.err = op.Err
	}
	return r
}

// readingParked is reading once the Read waits.
func readingParked(t testing.TB, c *Conn, b []byte) chan result {
	t.Helper()
	done := make(chan result, 1)
	parked(t, func() {
		n, err := io.ReadFull(c, b)
		done <- result{n, err}
	})
	return done
}

// receiveAll waits until c has received all that the peer has sent, and has the peer receive all
// that c has sent by then. It returns how many credits c had then.
func receiveAll(t testing.TB, c *Conn, p *smbdpeer.Raw) (left int) {
	t.Helper()
	require.True(t, eventually(func() bool {
		st := c.Stats()
		return st.received() == uint64(p.Sent)
	}))
	st := c.Stats()
	for uint64(p.Received) < st.SegmentsSent+st.EmptySent {
		_, _, ok := p.ReceiveData()
		require.True(t, ok, "the connection has ended")
	}
	return st.SendCredits
}
