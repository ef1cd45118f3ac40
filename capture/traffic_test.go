package capture_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet"
	"github.com/rdmanet/rdmanet/capture"
	"github.com/rdmanet/rdmanet/internal/pcaptest"
	"github.com/rdmanet/rdmanet/internal/tsharktest"
)

const patience = 2 * time.Minute

// What the client sends, and what the server answers.
var up, down = contents(3<<20+17, 31, 3), contents(1<<20+5, 17, 2)

func contents(n, factor, shift int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i * factor >> shift)
	}
	return b
}

// serve takes one connection, everything that comes, and answers.
func serve(ln net.Listener) error {
	c, err := ln.Accept()
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := io.Copy(io.Discard, io.LimitReader(c, int64(len(up)))); err != nil {
		return err
	}
	_, err = c.Write(down)
	return err
}

// talk is the client of serve.
func talk(t *testing.T, c net.Conn) {
	t.Helper()
	defer c.Close()
	for rest := up; len(rest) > 0; { // pieces of all lengths
		n := min(len(rest), 1+len(rest)/3)
		_, err := c.Write(rest[:n])
		require.NoError(t, err)
		rest = rest[n:]
	}
	got, err := io.ReadAll(c)
	require.NoError(t, err)
	require.True(t, bytes.Equal(got, down))
}

// checkCapture fails unless the connection to server in a capture has carried
// exactly what serve and talk exchange.
func checkCapture(t *testing.T, file io.Reader, server netip.AddrPort) {
	t.Helper()
	frames, err := pcaptest.Read(file)
	require.NoError(t, err)
	sums := [2]interface {
		io.Writer
		Sum([]byte) []byte
	}{sha256.New(), sha256.New()}
	var sizes [2]int
	incomplete := 0
	r := capture.NewReassembler(capture.Config{
		Data: true,
		Upper: func(u *capture.UpperMessage) {
			if u.Conn.Ends[1].Addr != server || u.Kind != capture.Payload {
				return
			}
			if !u.Complete {
				incomplete++
			}
			sums[u.From].Write(u.Data)
			sizes[u.From] += len(u.Data)
		},
		Loss: func(l capture.Loss) {
			if l.Conn != nil && l.Conn.Ends[1].Addr == server {
				t.Errorf("%v: %v", l.Conn, l)
			}
		},
	})
	for _, f := range frames {
		r.Add(&capture.Packet{Time: f.Time, Link: capture.LinkEthernet, Data: f.Data})
	}
	r.Flush()
	s := r.Stats()
	t.Logf("%d packets, %d of RoCE, %d bytes, %d came again, %d out of order", s.Packets, s.RoCE, s.Bytes, s.Repeats, s.Reordered)
	require.Zero(t, incomplete)
	require.Equal(t, [2]int{len(up), len(down)}, sizes)
	wantUp, wantDown := sha256.Sum256(up), sha256.Sum256(down)
	require.Equal(t, wantUp[:], sums[0].Sum(nil))
	require.Equal(t, wantDown[:], sums[1].Sum(nil))
}

// What two rdmanet ends say to each other over the software device comes out of
// a capture byte for byte.
func TestOwnTraffic(t *testing.T) {
	tsharktest.NeedCapture(t)
	// An address of its own, as whatever else runs here talks over lo, too.
	pid := os.Getpid()
	addr := netip.AddrFrom4([4]byte{127, 128 + byte(pid>>16&63), byte(pid >> 8), byte(pid)})
	var server netip.AddrPort
	path := tsharktest.Capture(t, addr, func() {
		config := rdmanet.Config{Device: "iwarp"}
		ln, err := (&rdmanet.ListenConfig{Config: config}).Listen(t.Context(), "rdma4", netip.AddrPortFrom(addr, 0).String())
		require.NoError(t, err)
		defer ln.Close()
		server = ln.Addr().(*net.TCPAddr).AddrPort()
		done := make(chan error, 1)
		go func() { done <- serve(ln) }()
		c, err := (&rdmanet.Dialer{Config: config}).DialContext(t.Context(), "rdma4", server.String())
		require.NoError(t, err)
		talk(t, c)
		require.NoError(t, <-done)
	})
	file, err := os.Open(path)
	require.NoError(t, err)
	defer file.Close()
	checkCapture(t, file, server)
}

// The same over the kernel's devices, between two guests, the first of which
// captures.
func TestGuestTraffic(t *testing.T) {
	role := os.Getenv("RDMANET_VM_ROLE")
	if role == "" {
		t.Skip("vm/test runs this in two guests")
	}
	const port = 7777
	config := rdmanet.Config{Device: "rdma"}
	addr, peer := netip.MustParseAddr(os.Getenv("RDMANET_VM_ADDR")), netip.MustParseAddr(os.Getenv("RDMANET_VM_PEER"))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if role == "2" {
		for { // until the other guest listens
			c, err := (&rdmanet.Dialer{Config: config}).DialContext(ctx, "rdma4", netip.AddrPortFrom(peer, port).String())
			if err == nil {
				talk(t, c)
				return
			}
			require.NoError(t, ctx.Err(), "%v", err)
		}
	}
	captured := &growing{}
	cmd := exec.CommandContext(ctx, "dumpcap", "-q", "-i", "eth0", "-B", "64", "-P", "-w", "-", "-f", "udp or tcp")
	cmd.Stdout = captured
	require.NoError(t, cmd.Start())
	marker, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(peer, 9)))
	require.NoError(t, err)
	defer marker.Close()
	// A datagram that shows up tells that all before it is in the capture, too.
	mark := func(text string) {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for !captured.has(text) {
			marker.Write([]byte(text)) // an error is that nobody listens there
			select {
			case <-ctx.Done():
				t.Fatal("dumpcap captures nothing")
			case <-tick.C:
			}
		}
	}
	mark("the capture begins")
	server := netip.AddrPortFrom(addr, port)
	ln, err := (&rdmanet.ListenConfig{Config: config}).Listen(ctx, "rdma4", server.String())
	require.NoError(t, err)
	defer ln.Close()
	require.NoError(t, serve(ln))
	mark("the capture ends")
	require.NoError(t, cmd.Process.Signal(os.Interrupt))
	require.NoError(t, cmd.Wait())
	checkCapture(t, captured, server)
	fmt.Println("ok: captured", len(up), "and", len(down), "bytes over", os.Getenv("RDMANET_VM_DEVICE"))
}

// growing is what a program has written so far.
type growing struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (g *growing) Write(b []byte) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.b.Write(b)
}

func (g *growing) Read(b []byte) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.b.Read(b)
}

func (g *growing) has(text string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return bytes.Contains(g.b.Bytes(), []byte(text))
}
