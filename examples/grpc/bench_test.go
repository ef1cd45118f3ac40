package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rdmanet/rdmanet"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// The benchmarks call a server in another process, which runs the same test binary.
// docs/performance.md in the root of the repository has the commands.

var (
	benchRounds   = flag.Int("rounds", 11, "slices of each transport in BenchmarkCompare")
	benchSlice    = flag.Duration("slice", 250*time.Millisecond, "length of a slice in BenchmarkCompare")
	benchBusyPoll = flag.Duration("busypoll", 0, "Config.BusyPoll of both ends")
)

// benchTransports are TCP, a Unix socket, rdmanet with the TCP link of the software device, and
// rdmanet with shared memory: from the beginning, and after the first messages ("on").
var benchTransports = func() []string {
	names := []string{"tcp", "unix", "rdmanet"}
	device := os.Getenv("RDMANET_DEVICE")
	if runtime.GOOS == "linux" && (runtime.GOARCH == "amd64" || runtime.GOARCH == "arm64") && (device == "" || device == "iwarp") {
		names = append(names, "shared", "on")
	}
	return names
}()

// benchConfig is the Config of a transport of rdmanet's.
func benchConfig(transport string) rdmanet.Config {
	c := rdmanet.Config{BusyPoll: *benchBusyPoll, SameHost: "off"}
	switch transport {
	case "shared":
		c.Device, c.SameHost = "iwarp", "require"
	case "on":
		c.Device, c.SameHost = "iwarp", "on"
	}
	return c
}

// benchServerEnv is the environment variable that makes the test binary a server. Its value
// is the transport.
const benchServerEnv = "RDMANET_BENCH_SERVER"

const benchMethod = "/rdmanet.bench.Echo/Unary"

// A benchCase is the calls that a benchmark makes on one connection.
type benchCase struct {
	payload  int // bytes, in the request and in the answer
	inFlight int
}

var benchCases = []benchCase{{128, 1}, {128, 64}, {1 << 20, 1}, {1 << 20, 64}}

func (c benchCase) String() string {
	return fmt.Sprintf("bytes=%d/inflight=%d", c.payload, c.inFlight)
}

// BenchmarkUnary makes unary calls on one connection.
func BenchmarkUnary(b *testing.B) {
	for _, c := range benchCases {
		for _, transport := range benchTransports {
			b.Run(fmt.Sprintf("%v/transport=%s", c, transport), func(b *testing.B) {
				conn, stop := startBench(b, transport)
				defer stop()
				c.call(b, conn, c.inFlight) // connects
				b.ReportAllocs()
				b.ResetTimer()
				elapsed := c.call(b, conn, b.N)
				b.ReportMetric(float64(b.N)/elapsed.Seconds(), "req/s")
			})
		}
	}
}

// BenchmarkCompare compares unary calls over the transports, as BenchmarkCompare of the
// root package compares other work. The ratios are against TCP.
func BenchmarkCompare(b *testing.B) {
	for _, c := range benchCases {
		b.Run(fmt.Sprintf("Unary/%v", c), func(b *testing.B) {
			for b.Loop() {
				compareTransports(b, c)
			}
			b.ReportMetric(0, "ns/op") // not shown: it would be the time of the comparison
		})
	}
}

func compareTransports(b *testing.B, c benchCase) {
	n := make([]int, len(benchTransports)) // calls that fill a slice
	rates := make([][]float64, len(benchTransports))
	for round := range *benchRounds {
		for turn := range benchTransports {
			i := (round + turn) % len(benchTransports) // who begins alternates too
			rates[i] = append(rates[i], compareSlice(b, c, benchTransports[i], &n[i]))
		}
	}
	for i, transport := range benchTransports {
		b.ReportMetric(quantile(rates[i], 0.5), transport+"-req/s")
		if i == 0 {
			continue
		}
		var ratios []float64
		for round := range *benchRounds {
			ratios = append(ratios, rates[i][round]/rates[0][round])
		}
		b.ReportMetric(quantile(ratios, 0.5), transport+"-ratio")
		b.ReportMetric(quantile(ratios, 0.25), transport+"-ratio-q1")
		b.ReportMetric(quantile(ratios, 0.75), transport+"-ratio-q3")
	}
}

// compareSlice makes about n calls and returns their rate, in calls a second. It sets n to
// the number of calls that would have taken the time of a slice.
func compareSlice(b *testing.B, c benchCase, transport string, n *int) float64 {
	conn, stop := startBench(b, transport)
	defer stop()
	timed := func(n int) (elapsed time.Duration, fill int) {
		elapsed = c.call(b, conn, n)
		grow := float64(*benchSlice) / float64(max(elapsed, 1))
		return elapsed, max(1, int(float64(n)*min(grow, 100)))
	}
	for warm := time.Duration(0); warm < *benchSlice/4; {
		elapsed, fill := timed(max(*n/3, 1))
		warm += elapsed
		*n = fill
	}
	done := *n
	elapsed, fill := timed(done)
	*n = fill
	return float64(done) / elapsed.Seconds()
}

// quantile returns the nearest value of the sample, without interpolation.
func quantile(sample []float64, q float64) float64 {
	sorted := slices.Sorted(slices.Values(sample))
	return sorted[int(q*float64(len(sorted)-1)+0.5)]
}

// call makes n calls, inFlight at a time, and returns how long it took.
func (c benchCase) call(tb testing.TB, conn *grpc.ClientConn, n int) time.Duration {
	var next atomic.Int64
	errs := make(chan error, c.inFlight)
	start := time.Now()
	for range c.inFlight {
		go func() {
			in, out := wrapperspb.Bytes(make([]byte, c.payload)), new(wrapperspb.BytesValue)
			for next.Add(1) <= int64(n) {
				if err := conn.Invoke(context.Background(), benchMethod, in, out); err != nil {
					errs <- err
					return
				}
				if len(out.Value) != c.payload {
					errs <- fmt.Errorf("answer of %d bytes", len(out.Value))
					return
				}
			}
			errs <- nil
		}()
	}
	var err error
	for range c.inFlight {
		err = errors.Join(err, <-errs)
	}
	if err != nil {
		tb.Fatal(err)
	}
	return time.Since(start)
}

// startBench starts a server process, and returns a client of it. The server ends when stop
// is called, or when this process ends.
func startBench(tb testing.TB, transport string) (conn *grpc.ClientConn, stop func()) {
	exe, err := os.Executable()
	if err != nil {
		tb.Fatal(err)
	}
	cmd := exec.Command(exe, "-test.run=^TestBenchmarks$", "-busypoll="+benchBusyPoll.String())
	cmd.Env = append(os.Environ(), benchServerEnv+"="+transport)
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
	addr, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		tb.Fatal("server process: ", err)
	}
	conn, err = grpc.NewClient("passthrough:///"+strings.TrimSpace(addr),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			if transport == "tcp" || transport == "unix" {
				return new(net.Dialer).DialContext(ctx, transport, addr)
			}
			d := rdmanet.Dialer{Config: benchConfig(transport)}
			return d.DialContext(ctx, "tcp", addr)
		}))
	if err != nil {
		tb.Fatal(err)
	}
	return conn, func() {
		conn.Close()
		in.Close()
		if err := cmd.Wait(); err != nil {
			tb.Error("server process:", err)
		}
	}
}

// serveBench prints the address of a server and ends with standard input.
func serveBench(transport string) error {
	var l net.Listener
	var err error
	switch transport {
	case "tcp":
		l, err = net.Listen("tcp", "127.0.0.1:0")
	case "unix":
		// An abstract name leaves no file behind.
		l, err = net.Listen("unix", fmt.Sprintf("@rdmanet-bench-%d", os.Getpid()))
	default:
		lc := rdmanet.ListenConfig{Config: benchConfig(transport)}
		l, err = lc.Listen(context.Background(), "tcp", "127.0.0.1:0")
	}
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "rdmanet.bench.Echo",
		Methods: []grpc.MethodDesc{{
			MethodName: "Unary",
			Handler: func(_ any, _ context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
				message := new(wrapperspb.BytesValue)
				return message, decode(message)
			},
		}},
	}, nil)
	go func() {
		io.Copy(io.Discard, os.Stdin)
		server.Stop()
	}()
	fmt.Println(l.Addr())
	return server.Serve(l)
}

// TestBenchmarks makes a few calls over each transport. The second process of the
// benchmarks begins here too.
func TestBenchmarks(t *testing.T) {
	if transport := os.Getenv(benchServerEnv); transport != "" {
		if err := serveBench(transport); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	for _, transport := range benchTransports {
		t.Run(transport, func(t *testing.T) {
			conn, stop := startBench(t, transport)
			defer stop()
			for _, c := range benchCases {
				c.call(t, conn, 10)
			}
		})
	}
}
