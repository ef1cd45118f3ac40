package tsharktest

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// patience is how long it may take until a marker is in a capture.
const patience = time.Minute

// NeedCapture skips the test if the user may not capture. In a guest of vm/run it fails the
// test instead.
func NeedCapture(tb testing.TB) {
	tb.Helper()
	err := mayCapture()
	switch {
	case err == nil:
	case os.Getenv("RDMANET_VM_ADDR") != "":
		tb.Fatal(err)
	default:
		tb.Skipf("%v: vm/test runs this in a guest, with what vm/install installs", err)
	}
}

// mayCapture reports whether dumpcap may open an interface. It makes dumpcap list the
// interface's link types.
var mayCapture = sync.OnceValue(func() error {
	out, err := exec.Command("dumpcap", "-i", "lo", "-L").CombinedOutput()
	if err != nil {
		return fmt.Errorf("dumpcap: %w: %s", err, out)
	}
	return nil
})

// Capture runs f, and captures the TCP segments to and from addr meanwhile. addr is an
// address of this machine. Capture returns the path of the capture, which is removed at the
// end of the test.
func Capture(tb testing.TB, addr netip.Addr, f func()) string {
	tb.Helper()
	// When a first datagram is in the capture, the capture is running. When a second one
	// is, everything before it is in the capture.
	marker, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, 0)))
	if err != nil {
		tb.Fatal(err)
	}
	defer marker.Close()
	here := marker.LocalAddr().(*net.UDPAddr)

	path := filepath.Join(tb.TempDir(), "capture.pcap")
	file, err := os.Create(path)
	if err != nil {
		tb.Fatal(err)
	}
	defer file.Close()
	captured := &watched{file: file}

	// Local traffic uses lo, whatever its address. To a pipe dumpcap writes frames at
	// once, and to a file it does not.
	filter := fmt.Sprintf("host %v and (tcp or udp port %d)", addr, here.Port)
	cmd := exec.Command("dumpcap", "-q", "-i", "lo", "-B", "64", "-P", "-w", "-", "-f", filter)
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = captured, &said
	if err := cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	defer func() {
		cmd.Process.Signal(os.Interrupt)
		if err := cmd.Wait(); err != nil {
			tb.Errorf("dumpcap: %v: %s", err, &said)
		}
		if s := said.String(); !strings.Contains(s, "/0 (pcap:0/dumpcap:0/") {
			tb.Errorf("dumpcap has lost frames, or does not say: %s", s)
		}
	}()

	mark := func(text string) {
		deadline := time.Now().Add(patience)
		for !captured.has(text) {
			if time.Now().After(deadline) {
				tb.Fatalf("dumpcap captures nothing: %s", &said)
			}
			if _, err := marker.WriteTo([]byte(text), here); err != nil {
				tb.Fatal(err)
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	mark("the capture begins")
	f()
	mark("the capture ends")
	return path
}

// watched is a file whose latest content can be searched.
type watched struct {
	file *os.File

	mu   sync.Mutex
	tail []byte
}

func (w *watched) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.tail = append(w.tail, b...)
	w.tail = bytes.Clone(w.tail[max(0, len(w.tail)-4096):])
	return w.file.Write(b)
}

func (w *watched) has(text string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return bytes.Contains(w.tail, []byte(text))
}
