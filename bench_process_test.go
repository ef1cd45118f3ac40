package rdmanet_test

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/rpc"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rdmanet/rdmanet"
)

// The far end of the benchmarks is a benchFarEnd behind net/rpc: in this
// process over a pipe, or in a second run of the test binary over its standard
// input and output. Only the control goes that way; what is measured goes over
// the listeners that the far end opens.

var (
	benchProcesses = flag.Int("processes", 1, "`processes` for benchmarks: with 2 the far end has its own")
	benchRounds    = flag.Int("rounds", 11, "slices of each transport in BenchmarkCompare and BenchmarkSameHost")
	benchSlice     = flag.Duration("slice", 250*time.Millisecond, "length of a slice in BenchmarkCompare and BenchmarkSameHost")
	benchBusyPoll  = flag.Duration("busypoll", 0, "Config.BusyPoll of both ends in benchmarks")
)

var benchNames = flag.String("transports", "", "what benchmarks measure, a `list` of tcp, unix, rdmanet, shared and on; the ratios are against the first")

// Each benchmark says which link it measures:
//
//	tcp      a TCP connection
//	unix     a Unix socket, on Linux
//	rdmanet  the RDMA device that leads to the address, or the software device with its TCP link
//	shared   the software device with shared memory from the first message
//	on       the software device with SameHost "on": with TCP, and shared memory when it has moved
//
// Two more are for BenchmarkTransfers, and are as rdmanet.

// benchTransports returns what the flag -transports says, and otherwise what a benchmark
// measures without it. Shared memory is left out of that where the system does not have it, and
// where the benchmarks run over an RDMA device.
func benchTransports(otherwise ...string) []string {
	names := otherwise
	if *benchNames != "" {
		names = strings.Split(*benchNames, ",")
		for _, name := range names {
			if !slices.Contains([]string{"tcp", "unix", "rdmanet", "shared", "on"}, name) {
				panic("-transports: " + name + " is none of tcp, unix, rdmanet, shared and on")
			}
		}
		return names
	}
	if !benchHasShared() {
		names = slices.DeleteFunc(slices.Clone(names), func(name string) bool { return name == "shared" })
	}
	return names
}

// usualTransports are what most benchmarks measure.
func usualTransports() []string { return benchTransports("tcp", "rdmanet", "shared") }

func benchHasShared() bool {
	if os.Getenv("RDMANET_VM_ADDR") != "" {
		return false
	}
	if device := os.Getenv("RDMANET_DEVICE"); device != "" && device != "iwarp" {
		return false
	}
	return runtime.GOOS == "linux" && (runtime.GOARCH == "amd64" || runtime.GOARCH == "arm64")
}

// A benchTarget is a service of the far end, reached over one transport.
type benchTarget struct {
	transport, addr string

	// opened is told of new connections, if it is not nil.
	opened func(net.Conn)
}

func (t benchTarget) dialContext(ctx context.Context, network, addr string) (c net.Conn, err error) {
	var d net.Dialer
	switch t.transport {
	case "tcp":
		c, err = d.DialContext(ctx, network, addr)
	case "unix":
		c, err = d.DialContext(ctx, "unix", t.addr)
	default:
		c, err = t.dialRDMA(ctx, network, addr)
	}
	if err == nil && t.opened != nil {
		t.opened(c)
	}
	return c, err
}

func (t benchTarget) dialRDMA(ctx context.Context, network, addr string) (net.Conn, error) {
	d := rdmanet.Dialer{Config: benchConfig(t.transport)}
	return d.DialContext(ctx, network, addr)
}

// url is where an HTTP client of the target goes.
func (t benchTarget) url() string {
	if t.transport == "unix" {
		return "http://unix"
	}
	return "http://" + t.addr
}

// benchConfig is the Config of a transport of rdmanet's.
func benchConfig(transport string) rdmanet.Config {
	c := rdmanet.Config{BusyPoll: *benchBusyPoll, SameHost: "off"}
	switch transport {
	case "shared":
		c.Device, c.SameHost = "iwarp", "require"
	case "on":
		c.Device, c.SameHost = "iwarp", "on"
	case "segments":
		c.TransferSize = -1
	case "transfers":
		c.TransferSize = 4096
	}
	return c
}

func (t benchTarget) dial() (net.Conn, error) {
	return t.dialContext(context.Background(), "tcp", t.addr)
}

func (t benchTarget) mustDial(tb testing.TB) net.Conn {
	c, err := t.dial()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { c.Close() })
	t.checkLink(tb, c)
	return c
}

// checkLink fails if a new connection has another link than the transport says.
func (t benchTarget) checkLink(tb testing.TB, c net.Conn) {
	rc, ok := c.(*rdmanet.Conn)
	if !ok || t.transport == "on" {
		return
	}
	if info := rc.Info(); (info.Link == sharedLink) != (t.transport == "shared") {
		tb.Fatalf("a connection of the transport %s has the link %q: %s", t.transport, info.Link, info.LinkReason)
	}
}

// sharedLink is Info.Link of a connection that uses shared memory.
const sharedLink = "shared memory"

// benchMemory returns memory to send from or to read into, of rdmanet's if
// registered is set.
func benchMemory(n int, registered bool) (b []byte, free func()) {
	if !registered {
		return make([]byte, n), func() {}
	}
	buf, err := rdmanet.Alloc(n)
	if err != nil {
		panic(err)
	}
	return buf.Bytes(), buf.Free
}

// A BenchService is what the far end is asked to serve, over which transport. It
// is exported for net/rpc.
type BenchService struct {
	Transport, Name string
	Size            int  // of the buffer, in bytes
	Registered      bool // and it is of rdmanet's
}

// The services, each for one connection. Those that take a length have it in
// eight bytes, most significant first.
var benchServices = map[string]func(c net.Conn, buf []byte) error{
	"sink": func(c net.Conn, buf []byte) error { // length, bytes; a byte back when all have come
		for {
			if _, err := io.ReadFull(c, buf[:8]); err != nil {
				return err
			}
			for left := binary.BigEndian.Uint64(buf); left > 0; {
				n, err := c.Read(buf[:min(left, uint64(len(buf)))])
				if err != nil {
					return err
				}
				left -= uint64(n)
			}
			if _, err := c.Write(buf[:1]); err != nil {
				return err
			}
		}
	},
	"source": func(c net.Conn, buf []byte) error { // length; that many bytes back, and one more
		for {
			if _, err := io.ReadFull(c, buf[:8]); err != nil {
				return err
			}
			for left := binary.BigEndian.Uint64(buf); left > 0; {
				n, err := c.Write(buf[:min(left, uint64(len(buf)))])
				if err != nil {
					return err
				}
				left -= uint64(n)
			}
			if _, err := c.Write(buf[:1]); err != nil {
				return err
			}
		}
	},
	"echo": func(c net.Conn, buf []byte) error { // a buffer; the same back
		for {
			if _, err := io.ReadFull(c, buf); err != nil {
				return err
			}
			if _, err := c.Write(buf); err != nil {
				return err
			}
		}
	},
	"burst": func(c net.Conn, buf []byte) error { // a length in a buffer; that many bytes, both ways, the buffer back
		for {
			if _, err := io.ReadFull(c, buf); err != nil {
				return err
			}
			n := int64(binary.BigEndian.Uint64(buf))
			if err := errors.Join(takeBurst(c, n), giveBurst(c, n)); err != nil {
				return err
			}
			if _, err := c.Write(buf); err != nil {
				return err
			}
		}
	},
	"answer": func(c net.Conn, buf []byte) error { // a buffer; the same back; the end
		if _, err := io.ReadFull(c, buf); err != nil {
			return err
		}
		_, err := c.Write(buf)
		return err
	},
	"hangup": func(c net.Conn, buf []byte) error { // a byte; the end
		_, err := io.ReadFull(c, buf[:1])
		return err
	},
}

// A benchFarEnd opens services on request. Its exported methods are for net/rpc.
type benchFarEnd struct {
	mu    sync.Mutex
	close map[string]func() // by address
	idle  *idleConns        // of DialIdle
	sink  packetSink        // of ListenPacket
}

// Listen starts a service on a port of its own and returns the address.
func (f *benchFarEnd) Listen(s BenchService, addr *string) error {
	l, err := s.listen()
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	stop := l.Close
	if serve, ok := benchServices[s.Name]; ok {
		wg.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					if !errors.Is(err, net.ErrClosed) {
						fmt.Fprintln(os.Stderr, "far end:", err)
					}
					return
				}
				wg.Go(func() {
					defer c.Close()
					buf, free := benchMemory(s.Size, s.Registered)
					defer free()
					serve(c, buf)
				})
			}
		})
	} else {
		srv := &http.Server{Handler: benchBody(make([]byte, s.Size))}
		wg.Go(func() { srv.Serve(l) })
		stop = srv.Close
	}
	*addr = l.Addr().String()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.close[*addr] = func() {
		stop()
		wg.Wait()
	}
	return nil
}

func (s BenchService) listen() (net.Listener, error) {
	address := "127.0.0.1:0"
	if host := os.Getenv("RDMANET_VM_ADDR"); host != "" { // of an RDMA device, see device_test.go
		address = net.JoinHostPort(host, "0")
	}
	switch s.Transport {
	case "tcp":
		return net.Listen("tcp", address)
	case "unix":
		return net.Listen("unix", fmt.Sprintf("@rdmanet-bench-%d-%d", os.Getpid(), unixListeners.Add(1)))
	}
	lc := rdmanet.ListenConfig{Config: benchConfig(s.Transport)}
	return lc.Listen(context.Background(), "tcp", address)
}

// unixListeners makes the names of Unix sockets differ.
var unixListeners atomic.Int32

// Close ends the service at addr, once its connections have ended.
func (f *benchFarEnd) Close(addr string, _ *struct{}) error {
	f.mu.Lock()
	end := f.close[addr]
	delete(f.close, addr)
	f.mu.Unlock()
	end()
	return nil
}

// benchBody is the answer to every HTTP request.
type benchBody []byte

func (body benchBody) ServeHTTP(w http.ResponseWriter, _ *http.Request) { w.Write(body) }

// listenBench asks peer for a service that lasts as long as tb.
func listenBench(tb testing.TB, peer *rpc.Client, s BenchService) benchTarget {
	target := benchTarget{transport: s.Transport}
	if err := peer.Call("FarEnd.Listen", s, &target.addr); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := peer.Call("FarEnd.Close", target.addr, new(struct{})); err != nil {
			tb.Error(err)
		}
	})
	return target
}

// startBenchPeer starts a far end in a process of its own if processes is 2,
// else in this one. It ends with tb, or when this process dies.
func startBenchPeer(tb testing.TB, processes int) *rpc.Client {
	if processes != 2 {
		near, far := net.Pipe()
		go serveBenchPeer(far)
		peer := rpc.NewClient(near)
		tb.Cleanup(func() { peer.Close() })
		return peer
	}
	exe, err := os.Executable()
	if err != nil {
		tb.Fatal(err)
	}
	cmd := exec.Command(exe, "-test.run=^TestBenchmarks$", "-busypoll="+benchBusyPoll.String())
	cmd.Env = append(os.Environ(), rdmanet.BenchPeerEnv+"=1")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		tb.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		tb.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	peer := rpc.NewClient(benchControl{out, in})
	tb.Cleanup(func() {
		peer.Close()
		if err := cmd.Wait(); err != nil {
			tb.Error("far end:", err)
		}
	})
	return peer
}

// benchControl is the control connection between two processes.
type benchControl struct {
	io.Reader
	io.WriteCloser
}

func serveBenchPeer(control io.ReadWriteCloser) {
	server := rpc.NewServer()
	if err := server.RegisterName("FarEnd", &benchFarEnd{close: make(map[string]func())}); err != nil {
		panic(err)
	}
	server.ServeConn(control)
}

// TestBenchmarks does a few operations of every benchmark with two processes.
// It is also where the second process comes in.
func TestBenchmarks(t *testing.T) {
	switch os.Getenv(rdmanet.BenchPeerEnv) {
	case "":
	case benchLoad:
		burnProcessor()
	default:
		control := benchControl{os.Stdin, os.Stdout}
		os.Stdout = os.Stderr // the control connection is not for printing
		serveBenchPeer(control)
		os.Exit(0) // closed, or the parent is gone
	}
	peer := startBenchPeer(t, 2)
	for _, group := range append(benchGroups(), benchGroup{"Read", readCases()}) {
		for _, c := range group.cases {
			for _, transport := range usualTransports() {
				t.Run(group.name+"/"+c.name+"/"+transport, func(t *testing.T) {
					if err := c.start(t, peer, transport)(new(benchStopwatch), 5); err != nil {
						t.Error(err)
					}
				})
			}
		}
	}
}
