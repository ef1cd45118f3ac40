package rdmanet

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// A scene is where connections meet a bad peer: a device of their own, on which
// nothing may be left, and the log of what went wrong.
type scene struct {
	t      testing.TB
	cfg    Config
	device *verbstest.Switch
	errs   chan error // logged
}

func newScene(t testing.TB) *scene { return newSceneOn(t, nil) }

// newSceneOn is newScene on a device of choice.
func newSceneOn(t testing.TB, p ibv.Provider) *scene {
	t.Helper()
	leaktest.Check(t)
	s := &scene{t: t, device: newSwitch(t, p), errs: make(chan error, 1000)}
	s.cfg = Config{
		Provider:              s.device,
		Logger:                slog.New(errorLog{slog.DiscardHandler, s.errs}),
		InitialReceiveCredits: 4,
		MaxReceiveCredits:     4,
		MaxFragmentedSize:     minFragmentedSize + 8,
	}
	return s
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

// A badPeer speaks verbs on a device of its own and says what it likes.
type badPeer struct {
	t    testing.TB
	id   ibv.ID
	pd   ibv.PD
	cq   ibv.CQ
	qp   ibv.QP
	mr   ibv.MR
	buf  []byte
	said []ibv.MR      // what did not go inline
	over chan struct{} // closed at the end of the connection

	credits int      // sends that the other side can take
	heard   [][]byte // messages that came while it waited for something else
	flushed bool     // a completion has told of the end
}

const (
	badRecvs    = 32
	badRecvSize = 9000
)

func newBadPeer(t testing.TB, id ibv.ID) *badPeer {
	t.Helper()
	p, err := tryBadPeer(t, id)
	require.NoError(t, err)
	return p
}

// tryBadPeer is for an ID that may be over, for which an RDMA device makes no queue pair.
func tryBadPeer(t testing.TB, id ibv.ID) (*badPeer, error) {
	t.Helper()
	p := &badPeer{t: t, id: id, over: make(chan struct{}), buf: make([]byte, badRecvs*badRecvSize)}
	var err error
	p.pd, err = id.Device().AllocPD()
	require.NoError(t, err)
	p.cq, err = id.Device().CreateCQ(1024)
	require.NoError(t, err)
	p.mr, err = p.pd.RegMR(p.buf, ibv.AccessLocalWrite)
	require.NoError(t, err)
	p.qp, err = id.CreateQP(p.pd, ibv.QPInit{SendCQ: p.cq, RecvCQ: p.cq,
		Cap: ibv.QPCap{MaxSendWR: 512, MaxRecvWR: badRecvs, MaxSendSGE: 1, MaxRecvSGE: 1,
			MaxInline: min(64<<10, id.Device().Attr().MaxInline)}})
	if err != nil {
		p.release()
		return nil, err
	}
	for i := range badRecvs {
		p.receive(i)
	}
	var once sync.Once
	id.Notify(func(ibv.Event) {
		once.Do(func() { close(p.over) })
		p.cq.Interrupt()
	})
	t.Cleanup(p.close)
	return p, nil
}

func (p *badPeer) receive(i int) {
	b := p.buf[i*badRecvSize:][:badRecvSize]
	p.qp.PostRecv([]ibv.RecvWR{{ID: uint64(i), SGL: []ibv.SGE{{Buf: b, LKey: p.mr.LKey()}}}})
}

// received returns a message that has come, and posts its receive again.
func (p *badPeer) received(wc *ibv.WC) []byte {
	i := int(wc.ID)
	b := bytes.Clone(p.buf[i*badRecvSize:][:wc.ByteLen])
	p.receive(i)
	return b
}

// close drops the connection without a word.
func (p *badPeer) close() {
	if p.qp == nil {
		return
	}
	p.qp.Close()
	p.qp = nil
	p.release()
}

// release gives back all but the queue pair.
func (p *badPeer) release() {
	p.cq.Close()
	for _, mr := range append(p.said, p.mr) {
		mr.Close()
	}
	p.pd.Close()
	p.id.Close()
}

// say sends one message, whatever is in it. The connection may have ended. b must
// not be changed afterwards.
func (p *badPeer) say(b []byte) {
	p.t.Helper()
	wr := ibv.SendWR{Op: ibv.OpSend, Flags: ibv.SendSignaled | ibv.SendSolicited, SGL: []ibv.SGE{{Buf: b}}}
	if len(b) <= p.qp.Cap().MaxInline {
		wr.Flags |= ibv.SendInline
	} else {
		mr, err := p.pd.RegMR(b, 0)
		require.NoError(p.t, err)
		p.said = append(p.said, mr)
		wr.SGL[0].LKey = mr.LKey()
	}
	p.qp.PostSend([]ibv.SendWR{wr})
}

// hear waits for the next message, nil at the end of the connection.
func (p *badPeer) hear() []byte {
	p.t.Helper()
	if len(p.heard) > 0 {
		b := p.heard[0]
		p.heard = p.heard[1:]
		return b
	}
	deadline := time.Now().Add(patience)
	var wc [1]ibv.WC
	for !p.flushed {
		require.NoError(p.t, p.cq.Arm(false))
		n, err := p.cq.Poll(wc[:])
		require.NoError(p.t, err)
		switch {
		case n == 1 && wc[0].Status != ibv.WCSuccess:
			p.flushed = true
			continue
		case n == 1 && wc[0].Op == ibv.WCRecv:
			return p.received(&wc[0])
		case n == 1:
			continue
		}
		if err := p.cq.Wait(deadline); !errors.Is(err, ibv.ErrInterrupted) {
			require.NoError(p.t, err, "neither a message nor the end")
		}
	}
	return nil
}

// rdmaID is the request of rdma.
const rdmaID = 1 << 40

// rdma has b go to the other side's memory by an RDMA Write, or come from there by
// an RDMA Read, and returns how that ended.
func (p *badPeer) rdma(op ibv.Opcode, b []byte, addr uint64, key uint32) ibv.WCStatus {
	p.t.Helper()
	mr, err := p.pd.RegMR(b, ibv.AccessLocalWrite)
	require.NoError(p.t, err)
	p.said = append(p.said, mr)
	_, err = p.qp.PostSend([]ibv.SendWR{{ID: rdmaID, Op: op, Flags: ibv.SendSignaled,
		SGL: []ibv.SGE{{Buf: b, LKey: mr.LKey()}}, RemoteAddr: addr, RKey: key}})
	require.NoError(p.t, err)
	deadline := time.Now().Add(patience)
	var wc [1]ibv.WC
	for {
		require.NoError(p.t, p.cq.Arm(false))
		n, err := p.cq.Poll(wc[:])
		require.NoError(p.t, err)
		switch {
		case n == 0:
			if err := p.cq.Wait(deadline); !errors.Is(err, ibv.ErrInterrupted) {
				require.NoError(p.t, err, "no completion of the %v", op)
			}
		case wc[0].ID == rdmaID:
			p.flushed = p.flushed || wc[0].Status != ibv.WCSuccess
			return wc[0].Status
		case wc[0].Status != ibv.WCSuccess:
			p.flushed = true
		case wc[0].Op == ibv.WCRecv:
			p.heard = append(p.heard, p.received(&wc[0]))
		}
	}
}

// segment waits for the next Data Transfer message and takes note of the
// credits in it; ok is false at the end of the connection.
func (p *badPeer) segment() (h segmentHeader, payload []byte, ok bool) {
	p.t.Helper()
	b := p.hear()
	if b == nil {
		return h, nil, false
	}
	payload, err := h.parse(b)
	require.NoError(p.t, err)
	p.credits += int(h.CreditsGranted)
	return h, payload, true
}

// ended waits for the end of the connection.
func (p *badPeer) ended() {
	p.t.Helper()
	for p.hear() != nil {
	}
	select {
	case <-p.over:
	case <-time.After(patience):
		require.FailNow(p.t, "the connection goes on")
	}
}

// rdmanetPrivate is the private data of a peer that knows half-close.
var rdmanetPrivate = privateData{rdmanet: true, features: featureFIN, maxReceive: 8136}.append(nil)

// messagesPrivate is that of one that knows the flags of messages too.
var messagesPrivate = privateData{rdmanet: true, features: featureFIN | featureMessages, maxReceive: 8136}.append(nil)

// badParam is what a bad peer connects with: as many RDMA Reads at a time as its
// private data says.
func badParam(id ibv.ID, private []byte) ibv.ConnParam {
	attr, said := id.Device().Attr(), parsePrivate(private)
	return ibv.ConnParam{Private: private, ResponderResources: min(int(said.ird), attr.MaxQPRdAtom),
		InitiatorDepth: min(int(said.ord), attr.MaxQPInitRdAtom)}
}

// earlyPrivate is that of a peer that negotiates early: msg, a request with a
// grant or a response, goes with it.
func earlyPrivate(msg []byte) []byte {
	return append(privateData{rdmanet: true, features: featureFIN | featureEarly, maxReceive: 8136}.append(nil), msg...)
}

// wireGrant is the grant behind an early request.
func wireGrant(n uint16) []byte { return binary.LittleEndian.AppendUint16(nil, n) }

// What a bad peer says as long as it is good.
var (
	goodRequest = negotiateRequest{MinVersion: smbdVersion, MaxVersion: smbdVersion, CreditsRequested: 16,
		PreferredSendSize: 1024, MaxReceiveSize: 8192, MaxFragmentedSize: 1 << 20}
	goodResponse = negotiateResponse{MinVersion: smbdVersion, MaxVersion: smbdVersion, NegotiatedVersion: smbdVersion,
		CreditsRequested: 16, CreditsGranted: 8, PreferredSendSize: 1024, MaxReceiveSize: 8192, MaxFragmentedSize: 1 << 20}
)

const badSegment = 1024 // the size of a Send that is agreed on with those

func (m negotiateRequest) wire() []byte {
	b := make([]byte, negotiateRequestLen)
	m.put(b)
	return b
}

// responseWith is a good response but for one change.
func responseWith(change func(m *negotiateResponse)) []byte {
	m := goodResponse
	change(&m)
	return m.wire()
}

func (m negotiateResponse) wire() []byte {
	b := make([]byte, negotiateResponseLen)
	m.put(b)
	return b
}

// dialBad connects to a listener, up to negotiation.
func dialBad(t testing.TB, addr net.Addr, private []byte) *badPeer {
	t.Helper()
	return dialBadWith(t, addr, func(*badPeer) []byte { return private })
}

// dialBadWith is for private data that tells of the peer's memory.
func dialBadWith(t testing.TB, addr net.Addr, say func(p *badPeer) []byte) *badPeer {
	t.Helper()
	for attempt := 1; ; attempt++ {
		id, err := newProvider(t).Resolve(tctx, netip.AddrPort{}, addr.(*net.TCPAddr).AddrPort())
		require.NoError(t, err)
		p := newBadPeer(t, id)
		private := say(p)
		param := badParam(id, private)
		if parsePrivate(private).features&featureTransfer == 0 {
			param.ResponderResources, param.InitiatorDepth = 1, 1
		}
		err = id.Connect(tctx, param)
		if err != nil && attempt < portTries && portTaken(err) {
			p.close()
			continue
		}
		require.NoError(t, err)
		return p
	}
}

// negotiate is the rest of it.
func (p *badPeer) negotiate() negotiateResponse {
	p.t.Helper()
	p.say(goodRequest.wire())
	var resp negotiateResponse
	require.NoError(p.t, resp.parse(p.hear()))
	p.credits = int(resp.CreditsGranted)
	return resp
}

// listenBad is where connections are dialled to a bad peer.
func listenBad(t testing.TB) ibv.Listener {
	t.Helper()
	local := netip.MustParseAddrPort(local4)
	var ln ibv.Listener
	require.NoError(t, onFreePort(local, func() (err error) {
		ln, err = newProvider(t).Listen(tctx, local, 0)
		return err
	}))
	t.Cleanup(func() { ln.Close() })
	return ln
}

// acceptBad takes the next connection request, and does not answer it.
func acceptBad(t testing.TB, ln ibv.Listener) *badPeer {
	t.Helper()
	ctx, cancel := context.WithTimeout(tctx, patience)
	defer cancel()
	id, err := ln.Accept(ctx)
	require.NoError(t, err)
	return newBadPeer(t, id)
}

// dial starts to dial a bad peer.
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
func (s *scene) earlyConns(active bool) (*Conn, *badPeer) {
	t := s.t
	t.Helper()
	if active {
		ln := listenBad(t)
		result := s.dial(ln)
		p := acceptBad(t, ln)
		request, granted := earlyRequest(p.id.PrivateData())
		require.NotNil(t, request)
		p.credits = int(granted)
		require.NoError(t, p.id.Accept(tctx, ibv.ConnParam{Private: earlyPrivate(goodResponse.wire())}))
		r := <-result
		require.NoError(t, r.err)
		return s.owned(r.c), p
	}
	ln := s.listen()
	p := dialBad(t, ln.Addr(), earlyPrivate(append(goodRequest.wire(), wireGrant(goodResponse.CreditsGranted)...)))
	var resp negotiateResponse
	require.NoError(t, resp.parse(earlyResponse(p.id.PrivateData())))
	p.credits = int(resp.CreditsGranted)
	c, err := ln.Accept()
	require.NoError(t, err)
	return s.owned(c), p
}

// conns makes a connection to a bad peer that has been good so far, with the
// connection under test on the active or the passive side. The peer has
// credits, and has granted those of goodResponse.
func (s *scene) conns(active bool, private []byte) (*Conn, *badPeer) {
	t := s.t
	t.Helper()
	if active {
		ln := listenBad(t)
		result := s.dial(ln)
		p := acceptBad(t, ln)
		require.NoError(t, p.id.Accept(tctx, badParam(p.id, private)))
		require.Len(t, p.hear(), negotiateRequestLen)
		p.say(goodResponse.wire())
		r := <-result
		require.NoError(t, r.err)
		p.await()
		return s.owned(r.c), p
	}
	ln := s.listen()
	p := dialBad(t, ln.Addr(), private)
	p.negotiate()
	c, err := ln.Accept()
	require.NoError(t, err)
	p.grant(goodResponse.CreditsGranted)
	return s.owned(c), p
}

func (s *scene) owned(c net.Conn) *Conn {
	s.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	return c.(*Conn)
}

// await waits until there is a credit.
func (p *badPeer) await() {
	p.t.Helper()
	for p.credits < 1 {
		_, _, ok := p.segment()
		require.True(p.t, ok, "the connection has ended")
	}
}

// grant sends a message that does nothing but grant credits.
func (p *badPeer) grant(n uint16) {
	p.credits--
	p.say(wireSegment(dataHeaderLen, segmentHeader{CreditsRequested: 16, CreditsGranted: n}))
}

// data sends n bytes of payload as a message of its own.
func (p *badPeer) data(n int) {
	p.credits--
	p.say(dataSegment(n, 0))
}

// dataSegment is a segment that carries n bytes and announces rest more.
func dataSegment(n, rest int) []byte {
	return wireSegment(dataOffset+n, segmentHeader{CreditsRequested: 16, CreditsGranted: 1,
		DataOffset: dataOffset, DataLength: uint32(n), Remaining: uint32(rest)})
}
