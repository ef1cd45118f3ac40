package tsharktest_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet"
	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/ibv/rdmacore"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
	"github.com/rdmanet/rdmanet/internal/tsharktest"
)

const patience = time.Minute

// A setting is two devices and an address that both have.
type setting struct {
	active, passive ibv.Provider
	addr            netip.Addr
}

// eachSetting runs f between two software devices and, where there is one, with
// Linux's siw in either role and over both families; with CRC and without.
func eachSetting(t *testing.T, f func(t *testing.T, s setting)) {
	addrs := []netip.Addr{loopback()}
	roles := []string{"software-software"}
	var kernel ibv.Provider
	if strings.HasPrefix(os.Getenv("RDMANET_VM_DEVICE"), "siw") {
		addrs = nil
		for _, env := range []string{"RDMANET_VM_ADDR", "RDMANET_VM_ADDR6"} {
			addrs = append(addrs, netip.MustParseAddr(os.Getenv(env)))
		}
		roles = append(roles, "software-siw", "siw-software")
		var err error
		kernel, err = rdmacore.New(rdmacore.Config{})
		require.NoError(t, err)
	}
	for _, addr := range addrs {
		family := "IPv4"
		if addr.Is6() {
			family = "IPv6"
		}
		for _, role := range roles {
			for _, crc := range []bool{false, true} {
				// Only the initiator's wish is heard everywhere, and siw has none.
				if crc && role == "siw-software" {
					continue
				}
				// Over TCP, as FPDUs in shared memory are in no capture.
				software := iwarp.New(iwarp.Config{CRC: crc, SameHost: iwarp.SameHostOff})
				s := setting{active: software, passive: software, addr: addr}
				switch role {
				case "software-siw":
					s.passive = kernel
				case "siw-software":
					s.active = kernel
				}
				t.Run(fmt.Sprintf("%s/%s/CRC=%v", family, role, crc), func(t *testing.T) { f(t, s) })
			}
		}
	}
}

// loopback is an address of this process alone, so that a capture has nobody
// else's traffic.
func loopback() netip.Addr {
	pid := os.Getpid()
	return netip.AddrFrom4([4]byte{127, 64 + byte(pid>>16&63), byte(pid >> 8), byte(pid)})
}

// TestTraffic has dissected what goes over the wire in all settings: every
// operation of the verbs, HTTP over a Conn, and messages.
func TestTraffic(t *testing.T) {
	eachSetting(t, func(t *testing.T, s setting) {
		captured(t, s.addr, func() {
			everyOperation(t, s)
			// All in segments: what goes by RDMA is not counted as messages.
			cfg := rdmanet.Config{MaxSendSize: segment, MaxReceiveSize: segment, TransferSize: -1}
			served, dialled := cfg, cfg
			served.Provider, dialled.Provider = s.passive, s.active
			exchangeHTTP(t, s.addr, &rdmanet.ListenConfig{Config: served}, &rdmanet.Dialer{Config: dialled})
			exchangeMessages(t, s.addr, &rdmanet.ListenConfig{Config: served}, &rdmanet.Dialer{Config: dialled})
		})
	})
}

// segment is so small that it fits one FPDU on every device: tshark is told to
// take every Send for itself.
const segment = 8192

// requireTraffic examines a capture of TestTraffic.
func requireTraffic(t *testing.T, path, name string) {
	t.Helper()
	tally, w := agree(t, path)
	if all := sum(tally.FPDUs); strings.Contains(name, "CRC=true") {
		require.Equal(t, all, tally.GoodCRC)
	} else {
		require.Equal(t, all, tally.NoCRC)
	}
	ops := []iwarpwire.Opcode{iwarpwire.Write, iwarpwire.ReadRequest, iwarpwire.ReadResponse,
		iwarpwire.Send, iwarpwire.SendSE, iwarpwire.Terminate}
	if !strings.Contains(name, "siw-software") { // siw has no Send with Invalidate for programs
		ops = append(ops, iwarpwire.SendInv, iwarpwire.SendSEInv)
	}
	for _, op := range ops {
		require.NotZero(t, tally.FPDUs[op], "%v", op)
	}
	require.Equal(t, w.negotiations, tally.Negotiations)
	require.NotZero(t, w.extended, "nobody said FIN")
	require.Greater(t, w.messages, 2*transferred/segment)
	require.Equal(t, w.messages-w.extended, tally.Messages)
}

// captured captures what f causes and examines it, or leaves that to
// TestCaptures where there is a folder for the results: in a guest tshark takes
// its time.
func captured(t *testing.T, addr netip.Addr, f func()) {
	t.Helper()
	tsharktest.NeedCapture(t)
	results := os.Getenv("RDMANET_VM_RESULTS")
	if results == "" {
		tsharktest.Need(t)
	}
	path := tsharktest.Capture(t, addr, f)
	if results == "" {
		examine(t, path, t.Name())
		return
	}
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	name := strings.ReplaceAll(t.Name(), "/", ",") + ".pcap"
	require.NoError(t, os.WriteFile(filepath.Join(results, name), b, 0o644))
}

// examine does what the test of that name wants of its capture.
func examine(t *testing.T, path, name string) {
	t.Helper()
	if strings.HasPrefix(name, "TestTraffic") {
		requireTraffic(t, path, name)
	} else {
		requireRevision1(t, path)
	}
}

// TestCaptures examines the captures that the tests of this package made in a
// guest with siw.
func TestCaptures(t *testing.T) {
	dir := os.Getenv("RDMANET_CAPTURES")
	if dir == "" {
		t.Skip("RDMANET_CAPTURES names no folder: vm/test runs this with captures from a guest")
	}
	paths, err := filepath.Glob(filepath.Join(dir, "*.pcap"))
	require.NoError(t, err)
	require.Len(t, paths, 11, "one of revision 1, and five of each family")
	for _, path := range paths {
		name := strings.TrimSuffix(filepath.Base(path), ".pcap")
		t.Run(name, func(t *testing.T) { examine(t, path, name) })
	}
}

func everyOperation(t *testing.T, s setting) {
	const size = 100_000 // more than an FPDU holds
	p := verbstest.NewPair(t, verbstest.Env{Active: s.active, Passive: s.passive, Addr: s.addr}, verbstest.PairConfig{})
	all := ibv.AccessLocalWrite | ibv.AccessRemoteRead | ibv.AccessRemoteWrite
	here, there := p.Active.Register(t, make([]byte, size), all), p.Passive.Register(t, make([]byte, size), all)
	caps := p.Active.Dev.Attr().Caps
	for _, n := range []int{1, 2, 3, size} { // of all lengths of padding
		for _, wr := range []ibv.SendWR{
			{Op: ibv.OpWrite, RemoteAddr: there.Addr(0), RKey: there.MR.RKey()},
			{Op: ibv.OpRead, RemoteAddr: there.Addr(0), RKey: there.MR.RKey()},
			{Op: ibv.OpSend},
			{Op: ibv.OpSend, Flags: ibv.SendSolicited},
			{Op: ibv.OpSendInv},
			{Op: ibv.OpSendInv, Flags: ibv.SendSolicited},
		} {
			if wr.Op == ibv.OpSendInv {
				if !caps.Has(ibv.CapSendInvalidate) {
					continue
				}
				wr.InvKey = p.Passive.Register(t, make([]byte, 1), all).MR.RKey()
			}
			send := wr.Op == ibv.OpSend || wr.Op == ibv.OpSendInv
			if send {
				p.Passive.Recv(t, ibv.RecvWR{SGL: there.SGL(0, size, 1)})
			}
			wr.SGL = here.SGL(0, n, 1)
			wr.Flags |= ibv.SendSignaled
			p.Active.Send(t, wr)
			require.Equal(t, ibv.WCSuccess, next(t, p.Active.SendCQ).Status)
			if send {
				require.Equal(t, ibv.WCSuccess, next(t, p.Passive.RecvCQ).Status)
			}
		}
	}
	// The other way, and then too far.
	p.Passive.Send(t, ibv.SendWR{Op: ibv.OpRead, Flags: ibv.SendSignaled, SGL: there.SGL(0, size, 1), RemoteAddr: here.Addr(0), RKey: here.MR.RKey()})
	require.Equal(t, ibv.WCSuccess, next(t, p.Passive.SendCQ).Status)
	ended := make(chan ibv.Event, 4)
	p.Active.ID.Notify(func(e ibv.Event) { ended <- e })
	p.Active.Send(t, ibv.SendWR{Op: ibv.OpRead, Flags: ibv.SendSignaled, SGL: here.SGL(0, 8, 1), RemoteAddr: there.Addr(size), RKey: there.MR.RKey()})
	require.NotEqual(t, ibv.WCSuccess, next(t, p.Active.SendCQ).Status)
	select {
	case <-ended:
	case <-time.After(patience):
		t.Fatal("the connection did not end")
	}
}

func next(t *testing.T, cq ibv.CQ) ibv.WC {
	t.Helper()
	var wc [1]ibv.WC
	for deadline := time.Now().Add(patience); ; {
		require.NoError(t, cq.Arm(false))
		n, err := cq.Poll(wc[:])
		require.NoError(t, err)
		if n > 0 {
			return wc[0]
		}
		require.NoError(t, cq.Wait(deadline))
	}
}

const transferred = 300_000 // many segments

func exchangeHTTP(t *testing.T, addr netip.Addr, lc *rdmanet.ListenConfig, d *rdmanet.Dialer) {
	ln, err := lc.Listen(t.Context(), "rdma", netip.AddrPortFrom(addr, 0).String())
	require.NoError(t, err)
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		w.Write(body)
	})}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ln) }()
	transport := &http.Transport{DialContext: d.DialContext}
	body := bytes.Repeat([]byte("as it was sent\n"), transferred/15)
	resp, err := (&http.Client{Transport: transport}).Post("http://"+ln.Addr().String(), "text/plain", bytes.NewReader(body))
	require.NoError(t, err)
	got, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	defect.Bytes(t, body, got)
	transport.CloseIdleConnections()
	require.NoError(t, srv.Shutdown(t.Context()))
	require.ErrorIs(t, <-served, http.ErrServerClosed)
}

func exchangeMessages(t *testing.T, addr netip.Addr, lc *rdmanet.ListenConfig, d *rdmanet.Dialer) {
	ln, err := lc.Listen(t.Context(), "rdma", netip.AddrPortFrom(addr, 0).String())
	require.NoError(t, err)
	defer ln.Close()
	accepted := make(chan net.Conn, 1)
	go func() {
		c, err := ln.Accept()
		if err != nil {
			t.Error(err)
			close(accepted)
			return
		}
		accepted <- c
	}()
	c, err := d.DialContext(t.Context(), "rdma", ln.Addr().String())
	require.NoError(t, err)
	defer c.Close()
	peer := <-accepted
	require.NotNil(t, peer)
	defer peer.Close()
	client, server := c.(*rdmanet.Conn), peer.(*rdmanet.Conn)
	buf := make([]byte, transferred)
	for _, n := range []int{1, segment - 24, segment, transferred} {
		wrote := make(chan error, 1)
		go func() {
			_, err := client.WriteMsg(make([]byte, n))
			wrote <- err
		}()
		got, err := server.ReadMsg(buf)
		require.NoError(t, err)
		require.NoError(t, <-wrote)
		require.Equal(t, n, got)
	}
	require.NoError(t, client.CloseWrite())
	_, err = server.Read(buf)
	require.Equal(t, io.EOF, err)
	require.NoError(t, server.CloseWrite())
	_, err = client.Read(buf)
	require.Equal(t, io.EOF, err)
}

// TestRevision1 has the device's answer to an initiator of MPA revision 1
// dissected, with private data both ways, and a message each way.
func TestRevision1(t *testing.T) {
	addr := loopback()
	captured(t, addr, func() {
		ln, err := iwarp.New(iwarp.Config{}).Listen(t.Context(), netip.AddrPortFrom(addr, 0), 0)
		require.NoError(t, err)
		defer ln.Close()
		conn, err := net.Dial("tcp", ln.Addr().String())
		require.NoError(t, err)
		defer conn.Close()
		require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
		request := iwarpwire.Start{CRC: true, Rev: 1, Private: []byte("request")}
		b, err := request.Append(nil)
		require.NoError(t, err)
		_, err = conn.Write(b)
		require.NoError(t, err)

		id, err := ln.Accept(t.Context())
		require.NoError(t, err)
		defer id.Close()
		require.Equal(t, request.Private, id.PrivateData())
		pd, err := id.Device().AllocPD()
		require.NoError(t, err)
		defer pd.Close()
		cq, err := id.Device().CreateCQ(4)
		require.NoError(t, err)
		defer cq.Close()
		qp, err := id.CreateQP(pd, ibv.QPInit{SendCQ: cq, RecvCQ: cq, SignalAll: true,
			Cap: ibv.QPCap{MaxSendWR: 1, MaxRecvWR: 1, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInline: 8}})
		require.NoError(t, err)
		defer qp.Close()
		_, err = qp.PostRecv([]ibv.RecvWR{{}})
		require.NoError(t, err)
		require.NoError(t, id.Accept(t.Context(), ibv.ConnParam{Private: []byte("reply")}))

		h := iwarpwire.Header{Op: iwarpwire.Send, Last: true, QN: iwarpwire.QNSend, MSN: 1}
		ulpdu := make([]byte, iwarpwire.UntaggedLen)
		h.Put(ulpdu)
		frame := append(binary.BigEndian.AppendUint16(nil, uint16(len(ulpdu))), ulpdu...)
		frame = append(frame, make([]byte, iwarpwire.Pad(len(ulpdu))+iwarpwire.CRCLen)...)
		body := len(frame) - iwarpwire.CRCLen
		iwarpwire.PutCRC(frame[body:], iwarpwire.CRC(0, frame[:body]))
		_, err = conn.Write(frame)
		require.NoError(t, err)
		require.Equal(t, ibv.WC{QPN: qp.QPN(), Op: ibv.WCRecv}, next(t, cq))
		_, err = qp.PostSend([]ibv.SendWR{{Flags: ibv.SendInline, SGL: []ibv.SGE{{Buf: []byte("hello")}}}})
		require.NoError(t, err)
		require.Equal(t, ibv.WCSuccess, next(t, cq).Status)
		require.NoError(t, id.Disconnect())
		_, err = io.Copy(io.Discard, conn)
		require.NoError(t, err)
	})
}

// requireRevision1 examines the capture of TestRevision1.
func requireRevision1(t *testing.T, path string) {
	t.Helper()
	tally, _ := agree(t, path)
	require.Equal(t, map[int]int{1: 1}, tally.Requests)
	require.Equal(t, map[int]int{1: 1}, tally.Replies)
	require.Equal(t, map[iwarpwire.Opcode]int{iwarpwire.Send: 2}, tally.FPDUs)
	require.Equal(t, 2, tally.GoodCRC)
}
