// Package demotest runs an example's main from the example's tests, in a process of its
// own.
package demotest

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/rdmanet/rdmanet"
	"github.com/rdmanet/rdmanet/examples/internal/demo"
	"github.com/rdmanet/rdmanet/internal/defect"
)

// asMain is the environment variable that makes the test program run the example's main.
const asMain = "RDMANET_EXAMPLE_MAIN"

// Main is called by TestMain. It runs the tests, or main if Run has started the process.
func Main(m *testing.M, main func()) {
	if os.Getenv(asMain) != "" {
		main()
	}
	os.Exit(m.Run())
}

// Run runs the example's main with args, and returns all that it printed. The error is not
// nil if the exit status is not 0.
func Run(t *testing.T, args ...string) (string, error) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, args...)
	// With the race detector a process would otherwise wait a second at its end.
	cmd.Env = append(os.Environ(), asMain+"=1", "GORACE=atexit_sleep_ms=0")
	out, err := cmd.CombinedOutput()
	if strings.Contains(string(out), demo.ErrDiffers.Error()) {
		t.Error(defect.Wrong("%s", out))
	}
	return string(out), err
}

// NoError fails the test if the client of an example has returned an error.
func NoError(t *testing.T, err error) {
	t.Helper()
	if errors.Is(err, demo.ErrDiffers) {
		err = defect.Wrong("%w", err)
	}
	if err != nil {
		t.Error(err)
	}
}

// Serve runs serve on a listener of rdmanet on this machine until the test ends. It returns
// the address.
func Serve(t *testing.T, serve func(net.Listener) error) string {
	t.Helper()
	ln, err := rdmanet.Listen("rdma", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		serve(ln)
	}()
	t.Cleanup(func() {
		ln.Close()
		<-done
	})
	return ln.Addr().String()
}

// ServePacket is like Serve, for datagrams.
func ServePacket(t *testing.T, serve func(net.PacketConn) error) string {
	t.Helper()
	p, err := rdmanet.ListenPacket("rdma", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		serve(p)
	}()
	t.Cleanup(func() {
		p.Close()
		<-done
	})
	return p.LocalAddr().String()
}
