package capture_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet"
	"github.com/rdmanet/rdmanet/capture"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/pcaptest"
	"github.com/rdmanet/rdmanet/internal/tsharktest"
)

const patience = 2 * time.Minute

// What the client sends, and what the server answers.
var up, down = contents(3<<20+17, 'u'), contents(1<<20+5, 'd')

func contents(n int, seed byte) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{seed}).Read(b)
	return b
}

// modes are the ways in which an rdmanet stream travels: what is large by RDMA
// Read or by RDMA Write, or everything in Sends.
var modes = []struct {
	name   string
	config rdmanet.Config
	op     capture.TransferOp // what announces a transfer
}{
	{"read", rdmanet.Config{TransferSize: 16 << 10}, capture.Offer},
	{"write", rdmanet.Config{TransferSize: 16 << 10, NoRDMARead: true}, capture.Request},
	{"send", rdmanet.Config{TransferSize: -1}, 0},
}

// serve takes one connection, sends down, and takes up, which it begins with
// when started is closed.
func serve(ln net.Listener, started <-chan struct{}) error {
	c, err := ln.Accept()
	if err != nil {
		return err
	}
	defer c.Close()
	sent := make(chan error, 1)
	go func() {
		b, err := rdmanet.Alloc(len(down)) // registered once
		if err != nil {
			sent <- err
			return
		}
		defer b.Free()
		copy(b.Bytes(), down)
		for rest := b.Bytes(); len(rest) > 0 && err == nil; {
			n := min(len(rest), 300<<10)
			_, err = c.Write(rest[:n])
			rest = rest[n:]
		}
		sent <- err
	}()
	<-started
	got, err := io.ReadAll(c)
	if err == nil {
		err = defect.Differ(up, got)
	}
	return errors.Join(err, <-sent)
}

// talk is the client of serve. The first pieces do not get through in time, so
// transfers are withdrawn; then it calls start.
func talk(t *testing.T, c *rdmanet.Conn, start func()) {
	t.Helper()
	defer c.Close()
	received := make(chan error, 1)
	go func() { received <- defect.ReadFull(c, down) }()
	patient := time.Millisecond
	for rest := up; len(rest) > 0; { // pieces of all lengths
		n := min(len(rest), 1+len(rest)/3)
		require.NoError(t, c.SetWriteDeadline(time.Now().Add(patient)))
		k, err := c.Write(rest[:n])
		if err != nil {
			require.ErrorIs(t, err, os.ErrDeadlineExceeded)
			if patient *= 4; patient > 100*time.Millisecond {
				start()
			}
		}
		rest = rest[k:]
		if len(rest) < 100000 && len(rest) > 0 {
			start()
			require.NoError(t, c.SetWriteDeadline(time.Time{}))
			_, err := c.WriteMsg(rest)
			require.NoError(t, err)
			break
		}
	}
	require.NoError(t, c.CloseWrite())
	require.NoError(t, <-received)
}

// checkCapture fails unless the connection to server in a capture has carried
// exactly what serve and talk exchange, in the way that op says.
func checkCapture(t *testing.T, file io.Reader, server netip.AddrPort, op capture.TransferOp) {
	t.Helper()
	frames, err := pcaptest.Read(file)
	require.NoError(t, err)
	var sent [2]bytes.Buffer
	transfers, withdrawn, wrong := 0, 0, 0
	r := capture.NewReassembler(capture.Config{
		Data: true,
		Upper: func(u *capture.UpperMessage) {
			if u.Conn.Ends[1].Addr != server {
				return
			}
			switch u.Kind {
			case capture.Transfer:
				if transfers++; u.Op != op {
					wrong++
				}
				if u.Withdrawn {
					withdrawn++
				}
				sent[u.From].Write(u.Data)
			case capture.Payload:
				sent[u.From].Write(u.Data)
			}
			if !u.Complete {
				wrong++
				t.Logf("%v %d of %d bytes, %v %d, missing %v, %v %v", u.Kind, u.Got, u.Size, u.Op, u.ID, u.Missing, u.HeadLost, u.TailLost)
			}
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
	t.Logf("%d packets, %d of RoCE, %d bytes, %d came again, %d out of order; %d transfers, %d withdrawn",
		s.Packets, s.RoCE, s.Bytes, s.Repeats, s.Reordered, transfers, withdrawn)
	require.Zero(t, wrong)
	require.Equal(t, op != 0, transfers > 0)
	require.Equal(t, [2]int{len(up), len(down)}, [2]int{sent[0].Len(), sent[1].Len()})
	require.True(t, bytes.Equal(up, sent[0].Bytes()) && bytes.Equal(down, sent[1].Bytes()), "other bytes than were sent")
}

// What two rdmanet ends say to each other over the software device comes out of
// a capture byte for byte.
func TestOwnTraffic(t *testing.T) {
	tsharktest.NeedCapture(t)
	for i, m := range modes {
		t.Run(m.name, func(t *testing.T) {
			// An address of its own, as whatever else runs here talks over lo, too.
			pid := os.Getpid()
			addr := netip.AddrFrom4([4]byte{127, 128 + byte(i)<<5 + byte(pid>>16&31), byte(pid >> 8), byte(pid)})
			var server netip.AddrPort
			path := tsharktest.Capture(t, addr, func() {
				config := m.config
				// Over TCP, as FPDUs in shared memory are in no capture.
				config.Device, config.SameHost = "iwarp", "off"
				ln, err := (&rdmanet.ListenConfig{Config: config}).Listen(t.Context(), "rdma4", netip.AddrPortFrom(addr, 0).String())
				require.NoError(t, err)
				defer ln.Close()
				server = ln.Addr().(*net.TCPAddr).AddrPort()
				started, done := make(chan struct{}), make(chan error, 1)
				go func() { done <- serve(ln, started) }()
				c, err := (&rdmanet.Dialer{Config: config}).DialContext(t.Context(), "rdma4", server.String())
				require.NoError(t, err)
				talk(t, c.(*rdmanet.Conn), sync.OnceFunc(func() { close(started) }))
				require.NoError(t, <-done)
			})
			file, err := os.Open(path)
			require.NoError(t, err)
			defer file.Close()
			checkCapture(t, file, server, m.op)
		})
	}
}

// The same over the kernel's devices, between two guests, the first of which
// captures.
func TestGuestTraffic(t *testing.T) {
	role := os.Getenv("RDMANET_VM_ROLE")
	if role == "" {
		t.Skip("vm/test runs this in two guests")
	}
	const port = 7777 // and those behind it
	addr, peer := netip.MustParseAddr(os.Getenv("RDMANET_VM_ADDR")), netip.MustParseAddr(os.Getenv("RDMANET_VM_PEER"))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if role == "2" {
		for i, m := range modes {
			m.config.Device = "rdma"
			for { // until the other guest listens
				c, err := (&rdmanet.Dialer{Config: m.config}).DialContext(ctx, "rdma4", netip.AddrPortFrom(peer, port+uint16(i)).String())
				if err == nil {
					talk(t, c.(*rdmanet.Conn), func() {})
					break
				}
				require.NoError(t, ctx.Err(), "%v", err)
			}
		}
		return
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
	started := make(chan struct{})
	close(started)
	for i, m := range modes {
		m.config.Device = "rdma"
		ln, err := (&rdmanet.ListenConfig{Config: m.config}).Listen(ctx, "rdma4", netip.AddrPortFrom(addr, port+uint16(i)).String())
		require.NoError(t, err)
		require.NoError(t, serve(ln, started))
		require.NoError(t, ln.Close())
	}
	mark("the capture ends")
	require.NoError(t, cmd.Process.Signal(os.Interrupt))
	require.NoError(t, cmd.Wait())
	for i, m := range modes {
		t.Run(m.name, func(t *testing.T) {
			checkCapture(t, bytes.NewReader(captured.b.Bytes()), netip.AddrPortFrom(addr, port+uint16(i)), m.op)
		})
	}
	if results := os.Getenv("RDMANET_VM_RESULTS"); results != "" {
		require.NoError(t, os.WriteFile(filepath.Join(results, os.Getenv("RDMANET_VM_DEVICE")+".pcap"), captured.b.Bytes(), 0o666))
	}
	if !t.Failed() {
		fmt.Println("ok: captured", len(up), "and", len(down), "bytes in", len(modes), "ways over", os.Getenv("RDMANET_VM_DEVICE"))
	}
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

func (g *growing) has(text string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return bytes.Contains(g.b.Bytes(), []byte(text))
}
