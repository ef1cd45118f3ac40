package iwarp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// rping(1) in Go, both ends. The client names a buffer in a Send, the server
// fetches it by RDMA Read and says so in a Send; the client names another, the
// server puts the same bytes there by RDMA Write and says so. The client speaks
// first, as iWARP wants it (RFC 5044, section 7.1).

// pingInfo is what rping's Sends carry, big-endian: 8 bytes address, 4 bytes
// key, 4 bytes size. Those of the server hold nothing.
const pingInfoLen = 16

// minPing is the smallest size of a ping that its text surely fits.
const minPing = 40

// pingText is the data of ping n: its number and a row of letters that begins
// one further each time, and a zero at the end.
func pingText(n, size int) []byte {
	const first, last = 'A', 'z'
	b := fmt.Appendf(nil, "rdma-ping-%d: ", n)
	for i := n; len(b) < size-1; i++ {
		b = append(b, byte(first+i%(last-first+1)))
	}
	return append(b, 0)
}

// pinger is one end.
type pinger struct {
	id   ibv.ID
	pd   ibv.PD
	cq   ibv.CQ
	qp   ibv.QP
	mrs  []ibv.MR
	size int

	info, start, data region // start is the client's only
}

type region struct {
	buf []byte
	mr  ibv.MR
}

func (r *region) sgl(n int) []ibv.SGE { return []ibv.SGE{{Buf: r.buf[:n], LKey: r.mr.LKey()}} }

// newPinger prepares an end for pings of up to size bytes and posts the first
// receive.
func newPinger(id ibv.ID, size int) (_ *pinger, err error) {
	p := &pinger{id: id, size: size}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	if p.pd, err = id.Device().AllocPD(); err != nil {
		return nil, err
	}
	if p.cq, err = id.Device().CreateCQ(32); err != nil {
		return nil, err
	}
	all := ibv.AccessLocalWrite | ibv.AccessRemoteRead | ibv.AccessRemoteWrite
	for _, r := range []struct {
		*region
		size   int
		access ibv.Access
	}{{&p.info, pingInfoLen, ibv.AccessLocalWrite}, {&p.start, size, ibv.AccessRemoteRead}, {&p.data, size, all}} {
		r.buf = make([]byte, r.size)
		if r.mr, err = p.pd.RegMR(r.buf, r.access); err != nil {
			return nil, err
		}
		p.mrs = append(p.mrs, r.mr)
	}
	limits := ibv.QPCap{MaxSendWR: 16, MaxRecvWR: 2, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInline: pingInfoLen}
	if p.qp, err = id.CreateQP(p.pd, ibv.QPInit{SendCQ: p.cq, RecvCQ: p.cq, Cap: limits, SignalAll: true}); err != nil {
		return nil, err
	}
	return p, p.receive()
}

// pingDepths are rping's: one RDMA Read at a time.
var pingDepths = ibv.ConnParam{ResponderResources: 1, InitiatorDepth: 1}

func (p *pinger) receive() error {
	_, err := p.qp.PostRecv([]ibv.RecvWR{{SGL: p.info.sgl(pingInfoLen)}})
	return err
}

func (p *pinger) post(wr ibv.SendWR) error {
	_, err := p.qp.PostSend([]ibv.SendWR{wr})
	return err
}

// tell sends where r is, or nothing of meaning if r has no memory.
func (p *pinger) tell(r *region) error {
	var info [pingInfoLen]byte
	if r.mr != nil {
		binary.BigEndian.PutUint64(info[0:], r.mr.Addr())
		binary.BigEndian.PutUint32(info[8:], r.mr.RKey())
		binary.BigEndian.PutUint32(info[12:], uint32(len(r.buf)))
	}
	return p.post(ibv.SendWR{Op: ibv.OpSend, Flags: ibv.SendInline, SGL: []ibv.SGE{{Buf: info[:]}}})
}

// told waits for the peer's next Send.
func (p *pinger) told() (addr uint64, key uint32, size int, err error) {
	wc, err := p.done(ibv.WCRecv)
	if err != nil {
		return 0, 0, 0, err
	}
	if wc.ByteLen != pingInfoLen {
		return 0, 0, 0, fmt.Errorf("a Send of %d bytes", wc.ByteLen)
	}
	addr = binary.BigEndian.Uint64(p.info.buf[0:])
	key = binary.BigEndian.Uint32(p.info.buf[8:])
	size = int(binary.BigEndian.Uint32(p.info.buf[12:]))
	return addr, key, size, p.receive()
}

// done waits for the completion of what, over those of Sends.
func (p *pinger) done(what ibv.WCOpcode) (ibv.WC, error) {
	deadline := time.Now().Add(patience)
	var wc [1]ibv.WC
	for {
		if err := p.cq.Arm(false); err != nil {
			return wc[0], err
		}
		n, err := p.cq.Poll(wc[:])
		switch {
		case err != nil:
			return wc[0], err
		case n == 0:
			if err := p.cq.Wait(deadline); err != nil {
				return wc[0], fmt.Errorf("waiting for a %v: %w", what, err)
			}
		case wc[0].Status != ibv.WCSuccess:
			return wc[0], fmt.Errorf("waiting for a %v: %w", what, wc[0].Status)
		case wc[0].Op == what:
			return wc[0], nil
		case wc[0].Op != ibv.WCSend:
			return wc[0], fmt.Errorf("a %v completed where a %v was to come", wc[0].Op, what)
		}
	}
}

// ping is the client's part of count rounds.
func (p *pinger) ping(count int) error {
	for n := range count {
		text := pingText(n, p.size)
		copy(p.start.buf, text)
		clear(p.data.buf)
		for _, r := range []*region{&p.start, &p.data} {
			if err := p.tell(r); err != nil {
				return err
			}
			if _, _, _, err := p.told(); err != nil {
				return fmt.Errorf("ping %d: %w", n, err)
			}
		}
		if err := defect.Differ(text, p.data.buf); err != nil {
			return fmt.Errorf("ping %d: %w", n, err)
		}
	}
	return nil
}

// serve is the server's part. It returns how many pings there were when the
// client left between two.
func (p *pinger) serve() (count int, err error) {
	for ; ; count++ {
		addr, key, size, err := p.told()
		if errors.Is(err, ibv.WCFlushErr) {
			return count, nil
		}
		if err == nil && size != p.size {
			err = fmt.Errorf("a buffer of %d bytes, want %d", size, p.size)
		}
		if err != nil {
			return count, fmt.Errorf("ping %d: %w", count, err)
		}
		if err := p.answer(count, addr, key); err != nil {
			return count, fmt.Errorf("ping %d: %w", count, err)
		}
	}
}

func (p *pinger) answer(n int, addr uint64, key uint32) error {
	wr := ibv.SendWR{Op: ibv.OpRead, SGL: p.data.sgl(p.size), RemoteAddr: addr, RKey: key}
	if err := p.post(wr); err != nil {
		return err
	}
	wc, err := p.done(ibv.WCRead)
	if err != nil {
		return err
	}
	if int(wc.ByteLen) != p.size {
		return fmt.Errorf("read %d bytes, want %d", wc.ByteLen, p.size)
	}
	if err := defect.Differ(pingText(n, p.size), p.data.buf); err != nil {
		return err
	}
	if err := p.tell(&region{}); err != nil {
		return err
	}
	wr.Op = ibv.OpWrite
	if wr.RemoteAddr, wr.RKey, _, err = p.told(); err != nil {
		return err
	}
	if err := p.post(wr); err != nil {
		return err
	}
	if _, err := p.done(ibv.WCWrite); err != nil {
		return err
	}
	return p.tell(&region{})
}

// close ends the connection and releases everything.
func (p *pinger) close() error {
	var errs []error
	if p.qp != nil {
		errs = append(errs, p.qp.Close())
	}
	for _, mr := range p.mrs {
		errs = append(errs, mr.Close())
	}
	if p.cq != nil {
		errs = append(errs, p.cq.Close())
	}
	if p.pd != nil {
		errs = append(errs, p.pd.Close())
	}
	return errors.Join(append(errs, p.id.Close())...)
}

// pingClient connects to a server, which may not be there yet, and pings it.
func pingClient(ctx context.Context, cfg Config, addr netip.AddrPort, count, size int) error {
	for {
		id, err := newOverTCP(cfg).Resolve(ctx, netip.AddrPort{}, addr)
		if err != nil {
			return err
		}
		p, err := newPinger(id, size)
		if err != nil {
			return err
		}
		err = p.id.Connect(ctx, pingDepths)
		if errors.Is(err, syscall.ECONNREFUSED) && ctx.Err() == nil {
			if err := p.close(); err != nil {
				return err
			}
			time.Sleep(10 * time.Millisecond)
			continue
		}
		if err == nil {
			err = p.ping(count)
		}
		if err == nil {
			err = p.id.Disconnect()
		}
		return errors.Join(err, p.close())
	}
}

// pingServer serves the next connection of ln.
func pingServer(ctx context.Context, ln ibv.Listener, size int) (count int, err error) {
	id, err := ln.Accept(ctx)
	if err != nil {
		return 0, err
	}
	p, err := newPinger(id, size)
	if err != nil {
		return 0, err
	}
	err = p.id.Accept(ctx, pingDepths)
	if err == nil {
		count, err = p.serve()
	}
	return count, errors.Join(err, p.close())
}

func pingContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	t.Cleanup(cancel)
	return ctx
}

// pingSizes are rping's default and the largest that it takes.
var pingSizes = []int{64, 64<<10 - 1}

// eachPing runs f with CRC and without, for both families and all sizes.
func eachPing(t *testing.T, addrs [2]string, f func(t *testing.T, cfg Config, addr netip.Addr, size int)) {
	for _, crc := range []bool{false, true} {
		for i, family := range []string{"IPv4", "IPv6"} {
			for _, size := range pingSizes {
				t.Run(fmt.Sprintf("%s/CRC=%v/%d", family, crc, size), func(t *testing.T) {
					leaktest.Check(t)
					f(t, Config{CRC: crc}, netip.MustParseAddr(addrs[i]), size)
				})
			}
		}
	}
}

const pings = 10

// TestPing has our client and our server ping each other.
func TestPing(t *testing.T) {
	eachPing(t, [2]string{"127.0.0.1", "::1"}, func(t *testing.T, cfg Config, addr netip.Addr, size int) {
		eachMode(t, func(t *testing.T, mode Config) {
			cfg.portable = mode.portable
			ctx := pingContext(t)
			ln, err := newOverTCP(Config{}).Listen(ctx, netip.AddrPortFrom(addr, 0), 0)
			require.NoError(t, err)
			defer ln.Close()
			client := make(chan error, 1)
			go func() { client <- pingClient(ctx, cfg, ln.Addr(), pings, size) }()
			count, err := pingServer(ctx, ln, size)
			require.NoError(t, errors.Join(err, <-client))
			require.Equal(t, pings, count)
		})
	})
}

// TestPingRevision1 pings our server from an initiator of MPA revision 1, which
// has private data of its own in the frame and no peer-to-peer mode.
func TestPingRevision1(t *testing.T) {
	leaktest.Check(t)
	const size, stag, from, to = minPing, 0x1234, 0x1000, 0x2000
	s := newSite(t, Config{})
	request := iwarpwire.Start{CRC: true, Rev: 1, Private: []byte("what a program says")}
	frame, err := request.Append(nil)
	require.NoError(t, err)
	raw := dialRaw(t, s.ln.Addr())
	raw.crc = true
	raw.send(frame)

	type served struct {
		count int
		err   error
	}
	done := make(chan served, 1)
	private := make(chan []byte, 1)
	go func() {
		count, err := pingServer(pingContext(t), privately{s.ln, private}, size)
		done <- served{count, err}
	}()
	reply := raw.start(true)
	require.Equal(t, iwarpwire.Start{Reply: true, CRC: true, Rev: 1, Private: reply.Private}, reply)
	require.Empty(t, reply.Private)
	require.Equal(t, request.Private, <-private)

	said := func(msn uint32, at uint64) []byte {
		info := binary.BigEndian.AppendUint64(nil, at)
		info = binary.BigEndian.AppendUint32(info, stag)
		return seal(true, sendOf(msn, 0, true, binary.BigEndian.AppendUint32(info, size)))
	}
	raw.send(said(1, from))
	h, payload := raw.frame()
	require.Equal(t, iwarpwire.ReadRequest, h.Op)
	var req iwarpwire.ReadReq
	require.Nil(t, req.Parse(payload))
	require.Equal(t, iwarpwire.ReadReq{SinkSTag: req.SinkSTag, SinkTO: req.SinkTO, Size: size, SrcSTag: stag, SrcTO: from}, req)
	text := pingText(0, size)
	raw.send(seal(true, answerOf(req.SinkSTag, req.SinkTO, false, text[:7])), seal(true, answerOf(req.SinkSTag, req.SinkTO+7, true, text[7:])))
	h, payload = raw.frame()
	require.Equal(t, iwarpwire.Header{Op: iwarpwire.Send, Last: true, QN: iwarpwire.QNSend, MSN: 1}, h)
	require.Len(t, payload, pingInfoLen)

	raw.send(said(2, to))
	h, payload = raw.frame()
	require.Equal(t, iwarpwire.Header{Op: iwarpwire.Write, Tagged: true, Last: true, STag: stag, TO: to}, h)
	require.Equal(t, text, payload)
	h, _ = raw.frame()
	require.Equal(t, iwarpwire.Header{Op: iwarpwire.Send, Last: true, QN: iwarpwire.QNSend, MSN: 2}, h)
	raw.hangUp(false)
	raw.ended()
	require.Equal(t, served{count: 1}, <-done)
}

// privately passes on the private data of the requests that it accepts.
type privately struct {
	ibv.Listener
	data chan []byte
}

func (l privately) Accept(ctx context.Context) (ibv.ID, error) {
	id, err := l.Listener.Accept(ctx)
	if err == nil {
		l.data <- bytes.Clone(id.PrivateData())
	}
	return id, err
}

// The tests against rping itself want a device that speaks iWARP, as vm/run
// names it.
func siwAddrs(t *testing.T) [2]string {
	t.Helper()
	if !strings.HasPrefix(os.Getenv("RDMANET_VM_DEVICE"), "siw") {
		t.Skip("RDMANET_VM_DEVICE names no siw device: vm/test runs this where there is one")
	}
	return [2]string{os.Getenv("RDMANET_VM_ADDR"), os.Getenv("RDMANET_VM_ADDR6")}
}

// TestRpingServer pings rping -s.
func TestRpingServer(t *testing.T) {
	eachPing(t, siwAddrs(t), func(t *testing.T, cfg Config, addr netip.Addr, size int) {
		ctx := pingContext(t)
		at := freePort(t, addr)
		server := startRping(t, "-s", at, "-S", fmt.Sprint(size))
		require.NoError(t, pingClient(ctx, cfg, at, pings, size), "rping says:\n%v", server)
		server.finish("server ping data", pings, size)
	})
}

// TestRpingPersistentServer pings rping -s -P from several clients, one after
// another: with two requests at a time rping confuses them.
func TestRpingPersistentServer(t *testing.T) {
	addr := netip.MustParseAddr(siwAddrs(t)[0])
	leaktest.Check(t)
	ctx := pingContext(t)
	at := freePort(t, addr)
	server := startRping(t, "-s", at, "-P")
	const clients = 3
	for range clients {
		require.NoError(t, pingClient(ctx, Config{CRC: true}, at, pings, pingSizes[0]), "rping says:\n%v", server)
	}
	server.stop() // it has no end of its own
	server.requirePings("server ping data", clients*pings, pingSizes[0])
}

// TestRpingClient has rping -c ping our server.
func TestRpingClient(t *testing.T) {
	eachPing(t, siwAddrs(t), func(t *testing.T, cfg Config, addr netip.Addr, size int) {
		ctx := pingContext(t)
		ln, err := newOverTCP(cfg).Listen(ctx, netip.AddrPortFrom(addr, 0), 0)
		require.NoError(t, err)
		defer ln.Close()
		client := startRping(t, "-c", ln.Addr(), "-S", fmt.Sprint(size), "-C", fmt.Sprint(pings))
		count, err := pingServer(ctx, ln, size)
		require.NoError(t, err, "rping says:\n%v", client)
		require.Equal(t, pings, count)
		client.finish("ping data", pings, size)
	})
}

// freePort returns a port of addr that nobody has, TCP's or siw's: it takes one
// from the kernel and gives it back.
func freePort(t *testing.T, addr netip.Addr) netip.AddrPort {
	t.Helper()
	ln, err := newOverTCP(Config{}).Listen(t.Context(), netip.AddrPortFrom(addr, 0), 0)
	require.NoError(t, err)
	defer ln.Close()
	return ln.Addr()
}

// rping is a process, and what it has said so far.
type rping struct {
	t    *testing.T
	cmd  *exec.Cmd
	done chan error

	mu   sync.Mutex
	said bytes.Buffer
}

// startRping runs rping, which validates what it gets and prints it.
func startRping(t *testing.T, role string, addr netip.AddrPort, more ...string) *rping {
	t.Helper()
	args := []string{"-oL", "rping", role, "-a", addr.Addr().String(), "-p", fmt.Sprint(addr.Port()), "-v", "-V"}
	r := &rping{t: t, cmd: exec.Command("stdbuf", append(args, more...)...), done: make(chan error, 1)}
	r.cmd.Stdout, r.cmd.Stderr = r, r
	require.NoError(t, r.cmd.Start())
	go func() {
		r.done <- r.cmd.Wait()
		close(r.done)
	}()
	t.Cleanup(r.stop)
	return r
}

func (r *rping) Write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.said.Write(b)
}

func (r *rping) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.said.String()
}

// stop ends rping in any case.
func (r *rping) stop() {
	r.cmd.Process.Kill()
	<-r.done
}

// rpingEnd is how long rping may take to end when all is done. It hangs there at
// times, with any peer, because its two threads miss each other.
const rpingEnd = 20 * time.Second

// finish waits for rping to end well, with as many pings as there should be.
// When it hangs at its end, what it has printed decides.
func (r *rping) finish(label string, count, size int) {
	r.t.Helper()
	select {
	case err := <-r.done:
		require.NoError(r.t, err, "rping says:\n%v", r)
	case <-time.After(rpingEnd):
		r.stop()
		r.t.Logf("rping hangs at its end")
	}
	r.requirePings(label, count, size)
}

// requirePings checks the pings that rping printed: count lines, each the text
// of a ping, and as many of ping 0 as of the others.
func (r *rping) requirePings(label string, count, size int) {
	r.t.Helper()
	want := make(map[string]int)
	for n := range count {
		text := pingText(n%pings, size)
		want[string(text[:len(text)-1])]++
	}
	got := make(map[string]int)
	for line := range strings.Lines(r.String()) {
		if text, ok := strings.CutPrefix(line, label+": "); ok {
			got[strings.TrimSuffix(text, "\n")]++
		}
	}
	require.Equal(r.t, want, got)
}
