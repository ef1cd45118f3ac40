package iwarp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
)

// patience is how long a test waits for what must happen.
const patience = time.Minute

var loopback = netip.MustParseAddrPort("127.0.0.1:0")

// modes are the two ways in which the device uses its socket.
var modes = []struct {
	name     string
	portable bool
}{{"raw", false}, {"portable", true}}

func eachMode(t *testing.T, run func(t *testing.T, cfg Config)) {
	for _, m := range modes {
		t.Run(m.name, func(t *testing.T) { run(t, Config{portable: m.portable}) })
	}
}

// A rawPeer is the far end of a queue pair as bytes on a TCP connection: free
// to break every rule.
type rawPeer struct {
	t    testing.TB
	conn *net.TCPConn
	crc  bool // frame seals its FPDUs, and checks those it reads
}

func newRawPeer(t testing.TB, conn net.Conn) *rawPeer {
	conn.SetDeadline(time.Now().Add(patience))
	p := &rawPeer{t: t, conn: conn.(*net.TCPConn)}
	t.Cleanup(func() { p.conn.Close() })
	return p
}

func dialRaw(t testing.TB, addr netip.AddrPort) *rawPeer {
	t.Helper()
	conn, err := net.Dial("tcp", addr.String())
	require.NoError(t, err)
	return newRawPeer(t, conn)
}

func (p *rawPeer) send(parts ...[]byte) {
	p.t.Helper()
	_, err := p.conn.Write(bytes.Join(parts, nil))
	require.NoError(p.t, err)
}

// start reads a Request or Reply frame.
func (p *rawPeer) start(reply bool) iwarpwire.Start {
	p.t.Helper()
	s, err := readStart(p.conn, reply)
	require.NoError(p.t, err)
	return s
}

// frame reads one FPDU.
func (p *rawPeer) frame() (h iwarpwire.Header, payload []byte) {
	p.t.Helper()
	b := make([]byte, iwarpwire.LengthLen)
	_, err := io.ReadFull(p.conn, b)
	require.NoError(p.t, err, "length of an FPDU")
	ulen := int(binary.BigEndian.Uint16(b))
	b = append(b, make([]byte, iwarpwire.FPDULen(ulen)-len(b))...)
	_, err = io.ReadFull(p.conn, b[iwarpwire.LengthLen:])
	require.NoError(p.t, err, "FPDU of %d bytes", ulen)
	sum := uint32(0)
	if body := b[:len(b)-iwarpwire.CRCLen]; p.crc {
		sum = iwarpwire.CRC(0, body)
	}
	require.Equal(p.t, sum, iwarpwire.GetCRC(b[len(b)-iwarpwire.CRCLen:]), "CRC")
	ulpdu := b[iwarpwire.LengthLen:][:ulen]
	n, term := h.Parse(ulpdu)
	require.Nil(p.t, term)
	return h, ulpdu[n:]
}

// terminate reads up to and with a Terminate and the end behind it.
func (p *rawPeer) terminate() iwarpwire.TermMsg {
	p.t.Helper()
	for {
		h, payload := p.frame()
		if h.Op != iwarpwire.Terminate {
			continue
		}
		require.Equal(p.t, iwarpwire.Header{Op: iwarpwire.Terminate, Last: true, QN: iwarpwire.QNTerminate, MSN: 1}, h)
		m, err := iwarpwire.ParseTerminate(payload)
		require.NoError(p.t, err)
		require.False(p.t, m.Siw, "bit order of the RFC")
		p.ended()
		return m
	}
}

// ended requires that the device has ended the connection and said no more.
func (p *rawPeer) ended() {
	p.t.Helper()
	b, err := io.ReadAll(p.conn)
	if !isReset(err) {
		require.NoError(p.t, err)
	}
	require.Empty(p.t, b, "bytes before the end")
}

// hangUp ends the connection of a raw peer: with a reset, or by the end of its
// stream, while it still listens.
func (p *rawPeer) hangUp(reset bool) {
	p.t.Helper()
	if !reset {
		require.NoError(p.t, p.conn.CloseWrite())
		return
	}
	require.NoError(p.t, p.conn.SetLinger(0))
	require.NoError(p.t, p.conn.Close())
}

// drain listens until the device has ended the connection too.
func (p *rawPeer) drain() {
	p.t.Helper()
	_, err := io.Copy(io.Discard, p.conn)
	require.False(p.t, isTimeout(err), "the device did not end the connection")
	p.conn.Close()
}

// isReset reports whether err is how the end of a connection looks when bytes
// were under way to the side that ended it.
func isReset(err error) bool {
	return err != nil && !isTimeout(err)
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

// seal makes an FPDU of a ULPDU.
func seal(crc bool, ulpdu []byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, uint16(len(ulpdu)))
	b = append(b, ulpdu...)
	b = append(b, make([]byte, iwarpwire.Pad(len(ulpdu)))...)
	var sum [iwarpwire.CRCLen]byte
	if crc {
		iwarpwire.PutCRC(sum[:], iwarpwire.CRC(0, b))
	}
	return append(b, sum[:]...)
}

// segmentOf is the ULPDU of a DDP segment.
func segmentOf(h iwarpwire.Header, payload []byte) []byte {
	b := make([]byte, iwarpwire.UntaggedLen)
	return append(b[:h.Put(b)], payload...)
}

// sendOf is the segment of a Send.
func sendOf(msn, mo uint32, last bool, payload []byte) []byte {
	return segmentOf(iwarpwire.Header{Op: iwarpwire.Send, QN: iwarpwire.QNSend, MSN: msn, MO: mo, Last: last}, payload)
}

// writeOf is an RDMA Write of one segment.
func writeOf(stag uint32, to uint64, payload []byte) []byte {
	return segmentOf(iwarpwire.Header{Tagged: true, Last: true, Op: iwarpwire.Write, STag: stag, TO: to}, payload)
}

// answerOf is a segment of a Read Response.
func answerOf(stag uint32, to uint64, last bool, payload []byte) []byte {
	return segmentOf(iwarpwire.Header{Tagged: true, Last: last, Op: iwarpwire.ReadResponse, STag: stag, TO: to}, payload)
}

// readOf is a Read Request.
func readOf(msn uint32, req iwarpwire.ReadReq) []byte {
	b := make([]byte, iwarpwire.ReadReqLen)
	req.Put(b)
	return segmentOf(iwarpwire.Header{Op: iwarpwire.ReadRequest, Last: true, QN: iwarpwire.QNReadRequest, MSN: msn}, b)
}

// rtr is the empty RDMA Write that lets a responder speak.
func rtrFrame(crc bool) []byte { return seal(crc, writeOf(1, 0, nil)) }

// The memory of a victim: regions with a guard around each. Everything is
// filled with untouched; hostile peers send hostile bytes only.
const (
	untouched = 0xA5
	hostile   = 0x5A

	guardLen  = 64
	regionLen = 256
	recvLen   = 64 // of each receive; they lie one behind the other in local
	sinkAt    = 128
)

type memory struct {
	t     testing.TB
	pd    ibv.PD
	buf   []byte
	mrs   []ibv.MR
	local ibv.MR // for receives and the results of Reads
	both  ibv.MR // for the peer to read and to write
	read  ibv.MR // for the peer to read
	write ibv.MR // for the peer to write
}

func newMemory(t testing.TB, p *Provider) *memory {
	t.Helper()
	m := &memory{t: t}
	var err error
	m.pd, err = p.dev.AllocPD()
	require.NoError(t, err)
	access := []ibv.Access{ibv.AccessLocalWrite, ibv.AccessLocalWrite | ibv.AccessRemoteRead | ibv.AccessRemoteWrite,
		ibv.AccessRemoteRead, ibv.AccessLocalWrite | ibv.AccessRemoteWrite}
	m.buf = bytes.Repeat([]byte{untouched}, len(access)*(guardLen+regionLen)+guardLen)
	for i, a := range access {
		mr, err := m.pd.RegMR(m.region(i), a)
		require.NoError(t, err)
		m.mrs = append(m.mrs, mr)
	}
	m.local, m.both, m.read, m.write = m.mrs[0], m.mrs[1], m.mrs[2], m.mrs[3]
	return m
}

// region is the memory of the i-th region.
func (m *memory) region(i int) []byte {
	at := guardLen + i*(guardLen+regionLen)
	return m.buf[at : at+regionLen : at+regionLen]
}

// touched counts the bytes that are not what they were at first.
func (m *memory) touched() int {
	m.t.Helper()
	for i := range len(m.mrs) + 1 {
		at := i * (guardLen + regionLen)
		require.Equal(m.t, guardLen, bytes.Count(m.buf[at:at+guardLen], []byte{untouched}), "guard %d overwritten", i)
	}
	require.Equal(m.t, regionLen, bytes.Count(m.region(2), []byte{untouched}), "region for reading overwritten")
	return len(m.buf) - bytes.Count(m.buf, []byte{untouched})
}

func (m *memory) close() {
	m.t.Helper()
	for _, mr := range m.mrs {
		require.NoError(m.t, mr.Close())
	}
	require.NoError(m.t, m.pd.Close(), "a queue pair or a region was left")
}

// A victim is the device's end of a connection whose peer is hostile.
type victim struct {
	t      testing.TB
	mem    *memory
	id     ibv.ID
	cq     ibv.CQ
	qp     ibv.QP
	events chan ibv.Event
	beside []func() // closes what neighboursRegion has made
}

func newVictim(t testing.TB, id ibv.ID, mem *memory, recvs int) *victim {
	t.Helper()
	return newVictimThatHolds(t, id, mem, recvs, false)
}

// newVictimThatHolds is newVictim, with QPInit.HoldSends.
func newVictimThatHolds(t testing.TB, id ibv.ID, mem *memory, recvs int, holds bool) *victim {
	t.Helper()
	v := &victim{t: t, mem: mem, id: id, events: make(chan ibv.Event, 16)}
	var err error
	v.cq, err = id.Device().CreateCQ(256)
	require.NoError(t, err)
	v.qp, err = id.CreateQP(mem.pd, ibv.QPInit{SendCQ: v.cq, RecvCQ: v.cq,
		Cap: ibv.QPCap{MaxSendWR: 64, MaxRecvWR: 64, MaxSendSGE: 2, MaxRecvSGE: 1}, HoldSends: holds})
	require.NoError(t, err)
	for i := range recvs {
		v.receive(i)
	}
	id.Notify(func(e ibv.Event) { v.events <- e })
	return v
}

// receive posts the i-th receive.
func (v *victim) receive(i int) {
	v.t.Helper()
	b := v.mem.region(0)[i*recvLen:][:recvLen]
	_, err := v.qp.PostRecv([]ibv.RecvWR{{ID: uint64(i), SGL: []ibv.SGE{{Buf: b, LKey: v.mem.local.LKey()}}}})
	require.NoError(v.t, err)
}

// readID marks the completion of the RDMA Read.
const readID = 100

// read posts an RDMA Read of n bytes and returns the place that a Read Response
// must name.
func (v *victim) read(n int) (stag uint32, to uint64) {
	v.t.Helper()
	_, err := v.qp.PostSend([]ibv.SendWR{v.readRequest(n)})
	require.NoError(v.t, err)
	return v.mem.local.RKey(), v.mem.local.Addr() + sinkAt
}

// readRequest is an RDMA Read of n bytes from nowhere in particular.
func (v *victim) readRequest(n int) ibv.SendWR {
	sge := ibv.SGE{Buf: v.mem.region(0)[sinkAt:][:n], LKey: v.mem.local.LKey()}
	return ibv.SendWR{ID: readID, Op: ibv.OpRead, Flags: ibv.SendSignaled, SGL: []ibv.SGE{sge}, RKey: 7, RemoteAddr: 7}
}

// completions waits for n completions and returns their statuses by ID.
func (v *victim) completions(n int) map[uint64]ibv.WCStatus {
	v.t.Helper()
	got := make(map[uint64]ibv.WCStatus)
	deadline := time.Now().Add(patience)
	var wcs [16]ibv.WC
	for len(got) < n {
		require.NoError(v.t, v.cq.Arm(false))
		k, err := v.cq.Poll(wcs[:])
		require.NoError(v.t, err)
		for _, wc := range wcs[:k] {
			got[wc.ID] = wc.Status
		}
		if k == 0 {
			require.NoError(v.t, v.cq.Wait(deadline), "%d of %d completions came", len(got), n)
		}
	}
	return got
}

// event waits for the end of the connection.
func (v *victim) event() ibv.Event {
	v.t.Helper()
	select {
	case e := <-v.events:
		require.Equal(v.t, ibv.EventDisconnected, e.Kind)
		return e
	case <-time.After(patience):
		require.FailNow(v.t, "the connection did not end")
		panic("unreachable")
	}
}

// close releases the victim's own objects; nothing may hold them back, and the
// connection must have ended once only.
func (v *victim) close() {
	v.t.Helper()
	for _, f := range v.beside {
		f()
	}
	require.NoError(v.t, v.qp.Close())
	require.NoError(v.t, v.cq.Close())
	require.NoError(v.t, v.id.Close())
	require.LessOrEqual(v.t, len(v.events), 1, "one event at most is left to be told of")
}

// seize takes the receiving role, so that nobody reads. Who holds it may sleep in
// the socket until something comes.
func (st *stream) seize(p *rawPeer) {
	for !st.sit() {
		p.send(rtrFrame(p.crc))
	}
	st.wanted.Store(false)
	st.link.setReadDeadline(time.Time{})
}

// socketOf returns the socket of a stream over TCP.
func socketOf(st *stream) *socket {
	if p, ok := st.link.(*portable); ok {
		return &p.socket
	}
	return &st.link.(*tcp).socket
}

// A site is a device with a listener.
type site struct {
	t  testing.TB
	p  *Provider
	ln ibv.Listener
}

func newSite(t testing.TB, cfg Config) *site {
	t.Helper()
	s := &site{t: t, p: newOverTCP(cfg)}
	var err error
	s.ln, err = s.p.Listen(context.Background(), loopback, 0)
	require.NoError(t, err)
	t.Cleanup(func() { s.ln.Close() })
	return s
}

// accept waits for the next connection request.
func (s *site) accept(what ...any) ibv.ID {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	id, err := s.ln.Accept(ctx)
	require.NoError(s.t, err, what...)
	return id
}

// request is the MPA Request of a raw peer that knows the rules.
func request(crc bool) []byte {
	s := iwarpwire.Start{CRC: crc, Enhanced: true, Rev: 2, IRD: 4, ORD: 4, P2P: true, RTRWrite: true}
	b, err := s.Append(nil)
	if err != nil {
		panic(err)
	}
	return b
}

// depths is what victims connect with.
var depths = ibv.ConnParam{ResponderResources: 2, InitiatorDepth: 2}

// connect makes a connection that is all set up: the peer has sent its RTR, so
// the victim may speak.
func (s *site) connect(mem *memory, crc bool, recvs int) (*victim, *rawPeer) {
	s.t.Helper()
	p := dialRaw(s.t, s.ln.Addr())
	p.crc = crc
	p.send(request(crc))
	return s.welcome(p, newVictim(s.t, s.accept(), mem, recvs))
}

// connectHolding is connect, with QPInit.HoldSends.
func (s *site) connectHolding(mem *memory, recvs int) (*victim, *rawPeer) {
	s.t.Helper()
	p := dialRaw(s.t, s.ln.Addr())
	p.send(request(false))
	return s.welcome(p, newVictimThatHolds(s.t, s.accept(), mem, recvs, true))
}

// welcome accepts the connection of p for v.
func (s *site) welcome(p *rawPeer, v *victim) (*victim, *rawPeer) {
	s.t.Helper()
	require.NoError(s.t, v.id.Accept(context.Background(), depths))
	reply := p.start(true)
	require.Equal(s.t, p.crc, reply.CRC)
	p.send(rtrFrame(p.crc))
	return v, p
}

// A bystander is a good connection beside the hostile ones.
type bystander struct {
	v   *victim
	p   *rawPeer
	mem *memory
	msn uint32
}

func (s *site) bystander() *bystander {
	s.t.Helper()
	b := &bystander{mem: newMemory(s.t, s.p)}
	b.v, b.p = s.connect(b.mem, false, 1)
	return b
}

// check passes a message each way.
func (b *bystander) check() {
	t := b.v.t
	t.Helper()
	b.p.conn.SetDeadline(time.Now().Add(patience))
	b.msn++
	msg := fmt.Appendf(nil, "message %d", b.msn)
	b.p.send(seal(false, sendOf(b.msn, 0, true, msg)))
	require.Equal(t, map[uint64]ibv.WCStatus{0: ibv.WCSuccess}, b.v.completions(1))
	defect.Bytes(t, msg, b.mem.region(0)[:len(msg)])
	b.v.receive(0)
	_, err := b.v.qp.PostSend([]ibv.SendWR{{Op: ibv.OpSend, Flags: ibv.SendInline, SGL: []ibv.SGE{{Buf: msg}}}})
	require.NoError(t, err)
	h, payload := b.p.frame()
	require.Equal(t, iwarpwire.Header{Op: iwarpwire.Send, Last: true, MSN: b.msn}, h)
	require.Equal(t, string(msg), string(payload))
}

// close ends the good connection in an orderly way.
func (b *bystander) close() {
	t := b.v.t
	t.Helper()
	require.NoError(t, b.p.conn.CloseWrite())
	require.NoError(t, b.v.event().Err)
	b.v.close()
	b.p.ended()
	b.mem.close()
}

// newOverTCP returns a provider for peers that are bytes on a TCP connection, unless cfg says
// something about shared memory.
func newOverTCP(cfg Config) *Provider {
	if cfg.SameHost == SameHostDefault {
		cfg.SameHost = SameHostOff
	}
	return New(cfg)
}
