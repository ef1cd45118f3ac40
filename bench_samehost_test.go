package rdmanet_test

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/rpc"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rdmanet/rdmanet"
)

var (
	sameHostPlace = flag.String("place", "free", "`processors` of the two processes of BenchmarkSameHost: free, same or split")
	sameHostLoad  = flag.Int("load", 0, "`processes` with endless loops of lowest priority beside BenchmarkSameHost")
	sameHostProcs = flag.Int("samehost.procs", 2, "GOMAXPROCS of both processes of BenchmarkSameHost")
	sameHostOps   = flag.Int("samehost.ops", 0, "`operations` of each slice of BenchmarkSameHost, without a warm-up; 0 means as many as fill -slice")
)

// BenchmarkSameHost compares what two processes of one host have: TCP, a Unix socket, and rdmanet
// with its TCP link and with shared memory (see -transports). They take turns, -rounds slices of
// -slice each. Each slice has a fresh process at the far end, a fresh connection and a warm-up. The
// figures are medians over the slices, and the ratios are those of the slices of one round,
// against the first transport, which is TCP. At the end the benchmark prints a table with the
// quartiles of the ratios.
//
//	rt        round trips of 64 B: the mean, the median (p50) and the 99th percentile (p99) of
//	          their times, and the processor time of both processes a round trip (cpu)
//	paced     the same with 1 ms between two round trips; the processor time has that of the
//	          timer in it; paced5, paced50 and paced200 have more milliseconds between two, and
//	          want slices with some tens of these
//	stream*   writes of one size, one way: the rate, and the processor time of both processes in
//	          seconds a GiB (cpu)
//	http*     keep-alive requests by net/http with 128 B in the answer, 1 and 64 at a time
//	dial      connections with a byte there and a byte back, 16 at a time
//
// A wake-up from one processor to another costs much more than one on the same processor, and
// where the kernel puts two processes changes during a run. So -place says where they are: both on
// processor 0 (same), on 0 and 1 (split), or wherever the kernel puts them (free). With -load N
// there are N other processes that never sleep, at nice 19. They may use all processors.
//
// A slice should have 200 ms or more. In shorter ones connections have not grown to what the load
// asks for, above all with large writes.
//
// Go cannot count system calls. These two runs have the same work apart from 20000 operations,
// so the difference of their counts, divided by 20000, is the number of calls for an operation in
// both processes together:
//
//	go test -c -o rdmanet.test .
//	for n in 1000 21000; do
//		strace -f -c -o calls.$n ./rdmanet.test -test.run '^$' -test.bench 'SameHost/^rt$' \
//			-test.benchtime 1x -transports shared -rounds 1 -samehost.ops $n
//	done
//
// The program is slower there, and the background work of the Go runtime depends on time. So
// numbers below 0.1 say nothing, and how often an end sleeps may differ from what it does without
// strace.
func BenchmarkSameHost(b *testing.B) {
	if runtime.GOOS != "linux" {
		b.Skip("it needs /proc, sched_setaffinity(2) and Unix sockets with abstract names: run it on Linux")
	}
	if !slices.Contains([]string{"free", "same", "split"}, *sameHostPlace) {
		b.Fatalf("-place is %q: it must be free, same or split", *sameHostPlace)
	}
	startLoad(b, *sameHostLoad)
	transports := benchTransports("tcp", "unix", "rdmanet", "shared")
	var rows [][]string
	for _, c := range sameHostCases() {
		b.Run(c.name, func(b *testing.B) {
			var table [][]string
			for b.Loop() {
				table = compareSameHost(b, c, transports)
			}
			b.ReportMetric(0, "ns/op") // not shown: it would be the time of the comparison
			rows = append(rows, table...)
		})
	}
	printSameHost(transports, rows)
}

// A sameHostCase is one thing to measure.
type sameHostCase struct {
	name     string
	title    string // in the table
	bytes    int    // payload of one operation
	measures []sameHostMeasure
	service  BenchService
	open     func(tb testing.TB, target benchTarget, s *sameHostSlice) benchRun
	dials    bool // each operation has a connection of its own
}

// A sameHostSlice is what was measured in one slice.
type sameHostSlice struct {
	n, bytes int             // operations, and the payload of each
	elapsed  time.Duration   // of all operations
	busy     time.Duration   // processor time of both processes
	trips    []time.Duration // of round trips, each
}

// A sameHostMeasure is a figure of a slice.
type sameHostMeasure struct {
	name, unit string // name is empty for the only rate of a case
	value      func(s *sameHostSlice) float64
}

func (m sameHostMeasure) metric() string {
	if m.name == "" {
		return m.unit
	}
	return m.name + "-" + m.unit
}

func inMicroseconds(d time.Duration) float64 { return d.Seconds() * 1e6 }

var (
	sameHostMean = sameHostMeasure{"mean", "µs", func(s *sameHostSlice) float64 {
		return inMicroseconds(s.elapsed) / float64(s.n)
	}}
	sameHostCPU = sameHostMeasure{"cpu", "µs", func(s *sameHostSlice) float64 {
		return inMicroseconds(s.busy) / float64(s.n)
	}}
	sameHostRate = sameHostMeasure{"", "MB/s", func(s *sameHostSlice) float64 {
		return float64(s.n) * float64(s.bytes) / 1e6 / s.elapsed.Seconds()
	}}
	sameHostCPURate = sameHostMeasure{"cpu", "s/GiB", func(s *sameHostSlice) float64 {
		return s.busy.Seconds() / (float64(s.n) * float64(s.bytes) / (1 << 30))
	}}
)

func sameHostPercentile(name string, q float64) sameHostMeasure {
	return sameHostMeasure{name, "µs", func(s *sameHostSlice) float64 {
		sorted := slices.Sorted(slices.Values(s.trips))
		return inMicroseconds(sorted[int(q*float64(len(sorted)-1)+0.5)])
	}}
}

func sameHostOpsRate(unit string) sameHostMeasure {
	return sameHostMeasure{"", unit, func(s *sameHostSlice) float64 { return float64(s.n) / s.elapsed.Seconds() }}
}

func sameHostCases() []sameHostCase {
	p50, p99 := sameHostPercentile("p50", 0.5), sameHostPercentile("p99", 0.99)
	cases := []sameHostCase{
		tripCase("rt", "round trip of 64 B", 0, sameHostMean, p50, p99, sameHostCPU),
		tripCase("paced", "round trip of 64 B every ms", time.Millisecond, p50, sameHostCPU),
	}
	for _, ms := range []int{5, 50, 200} {
		name, title := fmt.Sprintf("paced%d", ms), fmt.Sprintf("round trip of 64 B every %d ms", ms)
		cases = append(cases, tripCase(name, title, time.Duration(ms)*time.Millisecond, p50))
	}
	for _, size := range sameHostSizes {
		c := plainCase(streamCase(BenchService{Name: "sink", Registered: size.bytes >= 1<<20}, size.bytes, false, writeAll))
		c.name, c.title = "stream"+size.name, "writes of "+size.title
		c.measures = []sameHostMeasure{sameHostRate, sameHostCPURate}
		cases = append(cases, c)
	}
	for i, inFlight := range []int{1, 64} {
		c := plainCase(httpCases()[i])
		c.name, c.title = fmt.Sprintf("http%d", inFlight), fmt.Sprintf("HTTP, %d in flight", inFlight)
		c.measures = []sameHostMeasure{sameHostOpsRate("req/s")}
		cases = append(cases, c)
	}
	return append(cases, dialCase())
}

var sameHostSizes = []struct {
	name, title string
	bytes       int
}{
	{"64", "64 B", 64}, {"256", "256 B", 256}, {"1k", "1 KiB", 1 << 10}, {"4k", "4 KiB", 4 << 10}, {"64k", "64 KiB", 64 << 10}, {"1m", "1 MiB", 1 << 20},
}

// plainCase is a case of another benchmark.
func plainCase(c benchCase) sameHostCase {
	return sameHostCase{
		bytes: c.bytes, service: c.service,
		open: func(tb testing.TB, target benchTarget, _ *sameHostSlice) benchRun { return c.open(tb, target) },
	}
}

// tripCase makes round trips of 64 B with a pause before each.
func tripCase(name, title string, pause time.Duration, measures ...sameHostMeasure) sameHostCase {
	const size = 64
	return sameHostCase{
		name: name, title: title, bytes: size, measures: measures,
		service: BenchService{Name: "echo", Size: size},
		open: func(tb testing.TB, target benchTarget, s *sameHostSlice) benchRun {
			c := target.mustDial(tb)
			buf := make([]byte, size)
			return func(_ benchClock, n int) error {
				s.trips = slices.Grow(s.trips[:0], n)
				start := time.Now()
				for range n {
					if pause > 0 {
						time.Sleep(pause)
						start = time.Now()
					}
					if _, err := c.Write(buf); err != nil {
						return err
					}
					if _, err := io.ReadFull(c, buf); err != nil {
						return err
					}
					now := time.Now()
					s.trips = append(s.trips, now.Sub(start))
					start = now
				}
				return nil
			}
		},
	}
}

// dialCase makes connections 16 at a time, each for a byte there and a byte back. The far end
// closes as soon as it has answered, so most of the states in which TCP keeps a closed connection
// are those of its port, and do not use up the ports of this end.
func dialCase() sameHostCase {
	return sameHostCase{
		name: "dial", title: "dial, byte, byte back, close", measures: []sameHostMeasure{sameHostOpsRate("conns/s")},
		service: BenchService{Name: "answer", Size: 1}, dials: true,
		open: func(_ testing.TB, target benchTarget, _ *sameHostSlice) benchRun {
			return func(_ benchClock, n int) error {
				return inParallel(n, 16, func(i int) error {
					c, err := target.dial()
					if err != nil {
						return err
					}
					b := [1]byte{byte(i)}
					_, err = c.Write(b[:])
					if err == nil {
						_, err = io.ReadFull(c, b[:])
					}
					if err == nil && b[0] != byte(i) {
						err = fmt.Errorf("wrong answer %d to %d", b[0], byte(i))
					}
					return errors.Join(err, c.Close())
				})
			}
		},
	}
}

// compareSameHost returns the rows of the table, one for each measure.
func compareSameHost(b *testing.B, c sameHostCase, transports []string) (rows [][]string) {
	n := make([]int, len(transports))
	slicesOf := make([][]sameHostSlice, len(transports))
	for round := range *benchRounds {
		for turn := range transports {
			i := (round + turn) % len(transports) // who begins alternates too
			slicesOf[i] = append(slicesOf[i], c.slice(b, transports[i], &n[i]))
		}
	}
	for _, m := range c.measures {
		title := c.title
		if m.name != "" {
			title += ", " + m.name
		}
		row := []string{title + ", " + m.unit}
		if m.name == "" && m.unit != "MB/s" {
			row = []string{title + ", /s"}
		}
		values := make([][]float64, len(transports))
		for i, transport := range transports {
			for _, s := range slicesOf[i] {
				values[i] = append(values[i], m.value(&s))
			}
			median := quantile(values[i], 0.5)
			b.ReportMetric(median, transport+"-"+m.metric())
			row = append(row, threeDigits(median))
		}
		for i, transport := range transports[1:] {
			ratios := ratiosOf(values[i+1], values[0])
			name := transport + "-ratio"
			if m.name != "" {
				name = transport + "-" + m.name + "-ratio"
			}
			b.ReportMetric(quantile(ratios, 0.5), name)
			row = append(row, summary("%.2f", ratios))
		}
		rows = append(rows, row)
	}
	return rows
}

// slice measures one slice of about n operations, and leaves in n what would have filled it.
func (c *sameHostCase) slice(b *testing.B, transport string, n *int) sameHostSlice {
	scope := &benchScope{TB: b}
	defer scope.end()
	far := startBenchPeer(scope, 2)
	c.service.Transport = transport
	target := listenBench(scope, far, c.service)
	placeBench(scope, far)

	var mu sync.Mutex
	var conns []*rdmanet.Conn
	if transport == "on" && !c.dials {
		target.opened = func(c net.Conn) {
			mu.Lock()
			defer mu.Unlock()
			conns = append(conns, c.(*rdmanet.Conn))
		}
	}
	probe := target
	probe.opened = nil
	probe.mustDial(scope).Close() // which looks at the link
	s := sameHostSlice{bytes: c.bytes}
	run := c.open(scope, target, &s)
	if *sameHostOps > 0 {
		*n = *sameHostOps
	} else {
		warmSlice(b, run, n)
	}
	awaitShared(b, run, func() []*rdmanet.Conn {
		mu.Lock()
		defer mu.Unlock()
		return conns
	})
	s.n = *n
	busy := benchBusy(b, far)
	s.elapsed = timeSlice(b, run, n)
	s.busy = benchBusy(b, far) - busy
	return s
}

// awaitShared does operations until all connections have moved to shared memory.
func awaitShared(b *testing.B, run benchRun, opened func() []*rdmanet.Conn) {
	for end := time.Now().Add(10 * time.Second); ; {
		conns := opened()
		i := slices.IndexFunc(conns, func(c *rdmanet.Conn) bool { return c.Info().Link != sharedLink })
		if i < 0 {
			return
		}
		if time.Now().After(end) {
			b.Fatalf("a connection has not moved to shared memory: %s", conns[i].Info().LinkReason)
		}
		if err := run(new(benchStopwatch), len(conns)); err != nil {
			b.Fatal(err)
		}
	}
}

// threeDigits formats a figure of the table.
func threeDigits(v float64) string {
	digits := 0
	for limit := 100.0; v < limit && digits < 3; limit /= 10 {
		digits++
	}
	return strconv.FormatFloat(v, 'f', digits, 64)
}

// printSameHost prints the table in Markdown.
func printSameHost(transports []string, rows [][]string) {
	if len(rows) == 0 {
		return
	}
	head := append([]string{"case"}, transports...)
	for _, transport := range transports[1:] {
		head = append(head, transport+"/"+transports[0]+" (quartiles)")
	}
	fmt.Printf("\nMedians of %d slices of %v, place %s, load %d, GOMAXPROCS %d, %s, %d processors\n\n",
		*benchRounds, *benchSlice, *sameHostPlace, *sameHostLoad, *sameHostProcs, runtime.Version(), runtime.NumCPU())
	fmt.Printf("| %s |\n|%s\n", strings.Join(head, " | "), strings.Repeat("---|", len(head)))
	for _, row := range rows {
		fmt.Printf("| %s |\n", strings.Join(row, " | "))
	}
	fmt.Println()
}

// placeBench puts both processes where -place says. It puts this one back at the end of tb.
func placeBench(tb testing.TB, far *rpc.Client) {
	near := -1 // any processor
	p := BenchPlace{Processor: -1, Procs: *sameHostProcs}
	switch *sameHostPlace {
	case "same":
		near, p.Processor = 0, 0
	case "split":
		near, p.Processor = 0, 1
	}
	callBench(tb, far, "Place", p, new(struct{}))
	restore, err := placeProcess(near)
	if err != nil {
		tb.Fatal(err)
	}
	procs := runtime.GOMAXPROCS(*sameHostProcs)
	tb.Cleanup(func() {
		runtime.GOMAXPROCS(procs)
		if err := restore(); err != nil {
			tb.Error(err)
		}
	})
}

// BenchPlace are the arguments of Place: a processor, negative for any, and GOMAXPROCS.
type BenchPlace struct{ Processor, Procs int }

// Place has the far end run on one processor. GOMAXPROCS is set in any case, as Go would otherwise
// follow the number of processors that the process may use.
func (f *benchFarEnd) Place(p BenchPlace, _ *struct{}) error {
	runtime.GOMAXPROCS(p.Procs)
	_, err := placeProcess(p.Processor)
	return err
}

// ProcessorTime returns the processor time of the process, that of the kernel for it included.
func (f *benchFarEnd) ProcessorTime(_ struct{}, d *time.Duration) (err error) {
	*d, err = processorTime()
	return err
}

// benchBusy returns the processor time of both processes.
func benchBusy(tb testing.TB, far *rpc.Client) (d time.Duration) {
	callBench(tb, far, "ProcessorTime", struct{}{}, &d)
	near, err := processorTime()
	if err != nil {
		tb.Fatal(err)
	}
	return near + d
}

// benchLoad is the value of BenchPeerEnv that makes the test binary an endless loop.
const benchLoad = "load"

// startLoad starts processes with endless loops of lowest priority, which end with tb, or when
// this process dies.
func startLoad(tb testing.TB, n int) {
	exe, err := os.Executable()
	if err != nil {
		tb.Fatal(err)
	}
	for range n {
		cmd := exec.Command("nice", "-n", "19", exe, "-test.run=^TestBenchmarks$")
		cmd.Env = append(os.Environ(), rdmanet.BenchPeerEnv+"="+benchLoad)
		cmd.Stderr = os.Stderr
		in, err := cmd.StdinPipe()
		if err != nil {
			tb.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() {
			in.Close()
			if err := cmd.Wait(); err != nil {
				tb.Error("load:", err)
			}
		})
	}
}

// burnProcessor keeps a processor busy until the standard input ends.
func burnProcessor() {
	go func() {
		io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	for {
		burned.Add(1)
	}
}

var burned atomic.Int64
