package rdmanet_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/rpc"
	"slices"
	"sync/atomic"
	"testing"
	"time"
)

// Each benchmark is a table of cases, and each case runs over TCP and over
// rdmanet with each of its links side by side, so that benchstat -col /transport
// puts one against the other. docs/performance.md has the commands.

// A benchCase is one thing to measure against a service of the far end.
type benchCase struct {
	name    string
	unit    string // what BenchmarkCompare reports: "MB/s", "µs" or a rate
	bytes   int    // payload of one operation
	service BenchService
	open    func(tb testing.TB, target benchTarget) benchRun
}

// A benchRun does n operations and returns when all of them are known to have
// reached the far end. It stops the clock for what is not to be counted.
type benchRun func(clock benchClock, n int) error

// A benchClock is a *testing.B or a benchStopwatch.
type benchClock interface {
	StartTimer()
	StopTimer()
}

// start opens the case over transport, against a service of its own.
func (c benchCase) start(tb testing.TB, peer *rpc.Client, transport string) benchRun {
	c.service.Transport = transport
	return c.open(tb, listenBench(tb, peer, c.service))
}

// value is what n operations in d make in the unit of the case.
func (c benchCase) value(n int, d time.Duration) float64 {
	switch c.unit {
	case "MB/s":
		return float64(n) * float64(c.bytes) / 1e6 / d.Seconds()
	case "µs":
		return d.Seconds() * 1e6 / float64(n)
	}
	return float64(n) / d.Seconds()
}

// benchWarmUp is the number of operations before the clock starts, so that
// buffers and credits have grown to what the load asks for.
const benchWarmUp = 64

func runBenchCases(b *testing.B, processes int, cases []benchCase) {
	peer := startBenchPeer(b, processes)
	for _, c := range cases {
		for _, transport := range usualTransports() {
			b.Run(c.name+"/transport="+transport, func(b *testing.B) {
				run := c.start(b, peer, transport)
				if err := run(new(benchStopwatch), benchWarmUp); err != nil {
					b.Fatal(err)
				}
				b.ReportAllocs()
				b.ResetTimer()
				if err := run(b, b.N); err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				switch c.unit {
				case "MB/s":
					b.SetBytes(int64(c.bytes))
				case "µs": // ns/op says it
				default:
					b.ReportMetric(c.value(b.N, b.Elapsed()), c.unit)
				}
			})
		}
	}
}

// BenchmarkBulk writes one way, and waits at the end until all was received.
func BenchmarkBulk(b *testing.B) { runBenchCases(b, *benchProcesses, bulkCases()) }

// BenchmarkPingPong waits for the answer to each message.
func BenchmarkPingPong(b *testing.B) { runBenchCases(b, *benchProcesses, pingPongCases()) }

// BenchmarkHTTP sends keep-alive requests, each of those in flight on a
// connection of its own.
func BenchmarkHTTP(b *testing.B) { runBenchCases(b, *benchProcesses, httpCases()) }

// BenchmarkConnect sets connections up: one after the other from dial to
// close, and many at a time with only the dial counted.
func BenchmarkConnect(b *testing.B) { runBenchCases(b, *benchProcesses, connectCases()) }

// BenchmarkWrite is BenchmarkBulk with the far end always in a process of its
// own: what it allocates, Write allocates.
func BenchmarkWrite(b *testing.B) { runBenchCases(b, 2, bulkCases()) }

// BenchmarkRead is the other direction: what it allocates, Read allocates.
func BenchmarkRead(b *testing.B) { runBenchCases(b, 2, readCases()) }

func bulkCases() []benchCase { return streamCases("sink", writeAll) }

func readCases() []benchCase {
	return streamCases("source", func(c net.Conn, buf []byte) error {
		_, err := io.ReadFull(c, buf)
		return err
	})
}

func writeAll(c net.Conn, buf []byte) error {
	_, err := c.Write(buf)
	return err
}

func streamCases(service string, move func(c net.Conn, buf []byte) error) (cases []benchCase) {
	for _, size := range []int{64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 1 << 20} {
		cases = append(cases, streamCase(BenchService{Name: service, Registered: size >= 1<<20}, size, false, move))
	}
	return cases
}

// streamCase moves bytes one way, a buffer an operation, which may be of rdmanet's.
// The far end's buffer holds as much, and at least 64 KiB, unless service says else.
func streamCase(service BenchService, size int, registered bool, move func(c net.Conn, buf []byte) error) benchCase {
	if service.Size == 0 {
		service.Size = max(size, 64<<10)
	}
	return benchCase{
		name: "size=" + sizeName(size), unit: "MB/s", bytes: size,
		service: service,
		open: func(tb testing.TB, target benchTarget) benchRun {
			c := target.mustDial(tb)
			length := make([]byte, 8)
			buf, free := benchMemory(size, registered)
			tb.Cleanup(free)
			return func(_ benchClock, n int) error {
				binary.BigEndian.PutUint64(length, uint64(n)*uint64(size))
				if _, err := c.Write(length); err != nil {
					return err
				}
				for range n {
					if err := move(c, buf); err != nil {
						return err
					}
				}
				_, err := io.ReadFull(c, length[:1]) // the far end is done
				return err
			}
		},
	}
}

func pingPongCases() (cases []benchCase) {
	for _, size := range []int{64, 1 << 10, 64 << 10} {
		cases = append(cases, benchCase{
			name: "size=" + sizeName(size), unit: "µs", bytes: size,
			service: BenchService{Name: "echo", Size: size},
			open: func(tb testing.TB, target benchTarget) benchRun {
				c := target.mustDial(tb)
				buf := make([]byte, size)
				return func(_ benchClock, n int) error {
					for range n {
						if _, err := c.Write(buf); err != nil {
							return err
						}
						if _, err := io.ReadFull(c, buf); err != nil {
							return err
						}
					}
					return nil
				}
			},
		})
	}
	return cases
}

func httpCases() (cases []benchCase) {
	for _, inFlight := range []int{1, 64} {
		cases = append(cases, benchCase{
			name: fmt.Sprintf("inflight=%d", inFlight), unit: "req/s",
			service: BenchService{Name: "http", Size: 128},
			open: func(tb testing.TB, target benchTarget) benchRun {
				transport := &http.Transport{
					DialContext:         target.dialContext,
					MaxConnsPerHost:     inFlight,
					MaxIdleConnsPerHost: inFlight,
				}
				tb.Cleanup(transport.CloseIdleConnections)
				client := &http.Client{Transport: transport}
				return func(_ benchClock, n int) error {
					return inParallel(n, inFlight, func(int) error {
						resp, err := client.Get(target.url())
						if err != nil {
							return err
						}
						_, err = io.Copy(io.Discard, resp.Body)
						return errors.Join(err, resp.Body.Close())
					})
				}
			},
		})
	}
	return cases
}

// The far end closes first in both, after it has read a byte: the states in
// which TCP keeps a closed connection are then those of the far end's port,
// and a long run does not exhaust the ports of this one.
func connectCases() []benchCase {
	hangUp := func(c net.Conn) error {
		defer c.Close()
		if _, err := c.Write([]byte{0}); err != nil {
			return err
		}
		if n, err := io.Copy(io.Discard, c); err != nil || n != 0 {
			return fmt.Errorf("%d bytes at the end of the connection, error %v", n, err)
		}
		return nil
	}
	return []benchCase{{
		name: "dial+close", unit: "conns/s",
		service: BenchService{Name: "hangup", Size: 1},
		open: func(_ testing.TB, target benchTarget) benchRun {
			return func(_ benchClock, n int) error {
				for range n {
					c, err := target.dial()
					if err != nil {
						return err
					}
					if err := hangUp(c); err != nil {
						return err
					}
				}
				return nil
			}
		},
	}, {
		name: "dial", unit: "conns/s",
		service: BenchService{Name: "hangup", Size: 1},
		open: func(_ testing.TB, target benchTarget) benchRun {
			return func(clock benchClock, n int) error {
				const atOnce, open = 16, 256
				for ; n > 0; n -= open {
					conns := make([]net.Conn, min(n, open))
					err := inParallel(len(conns), atOnce, func(i int) (err error) {
						conns[i], err = target.dial()
						return err
					})
					clock.StopTimer()
					if err := errors.Join(err, inParallel(len(conns), atOnce, func(i int) error {
						if conns[i] == nil {
							return nil
						}
						return hangUp(conns[i])
					})); err != nil {
						return err
					}
					clock.StartTimer()
				}
				return nil
			}
		},
	}}
}

// BenchmarkCompare puts rdmanet against TCP on a machine that is never quite at
// rest. The transports take turns in short slices, each on fresh connections between
// fresh pairs of processes, since how a pair settles on the cores and how its
// socket buffers grow differs more than the transports do. It reports the median
// of each, and the median and the quartiles of the ratio, rdmanet to TCP, of
// the slices of a round: ratio is that of rdmanet with its TCP link, and
// shared-ratio that of shared memory. A disturbance that lasts longer than a round
// changes the medians, hardly the ratio.
func BenchmarkCompare(b *testing.B) {
	for _, group := range benchGroups() {
		for _, c := range group.cases {
			b.Run(group.name+"/"+c.name, func(b *testing.B) {
				for b.Loop() {
					compare(b, c, usualTransports()...)
				}
				b.ReportMetric(0, "ns/op") // not shown: it would be the time of the comparison
			})
		}
	}
}

type benchGroup struct {
	name  string
	cases []benchCase
}

func benchGroups() []benchGroup {
	return []benchGroup{
		{"Bulk", bulkCases()}, {"PingPong", pingPongCases()}, {"HTTP", httpCases()}, {"Connect", connectCases()},
	}
}

// compare puts the transports against the first of them.
func compare(b *testing.B, c benchCase, transports ...string) {
	n := make([]int, len(transports)) // operations that fill a slice
	values := make([][]float64, len(transports))
	for round := range *benchRounds {
		for turn := range transports {
			i := (round + turn) % len(transports) // who begins alternates too
			values[i] = append(values[i], compareSlice(b, c, transports[i], &n[i]))
		}
	}
	for i, transport := range transports {
		b.ReportMetric(quantile(values[i], 0.5), transport+"-"+c.unit)
		if i == 0 {
			continue
		}
		name, ratios := ratioName(transport), ratiosOf(values[i], values[0])
		b.ReportMetric(quantile(ratios, 0.5), name)
		b.ReportMetric(quantile(ratios, 0.25), name+"-q1")
		b.ReportMetric(quantile(ratios, 0.75), name+"-q3")
	}
}

// ratioName is the name of a transport's ratio to the first.
func ratioName(transport string) string {
	switch transport {
	case "rdmanet", "transfers":
		return "ratio"
	}
	return transport + "-ratio"
}

// ratiosOf returns the ratios of the slices of each round.
func ratiosOf(ours, theirs []float64) (ratios []float64) {
	for round := range ours {
		ratios = append(ratios, ours[round]/theirs[round])
	}
	return ratios
}

// compareSlice measures one slice of about n operations and leaves in n what
// would have filled it.
func compareSlice(b *testing.B, c benchCase, transport string, n *int) float64 {
	scope := &benchScope{TB: b}
	defer scope.end()
	run := c.start(scope, startBenchPeer(scope, 2), transport)
	warmSlice(b, run, n)
	done := *n
	return c.value(done, timeSlice(b, run, n))
}

// warmSlice lasts a quarter of a slice, and leaves in n how many operations fill a slice.
func warmSlice(b *testing.B, run benchRun, n *int) {
	for warm := time.Duration(0); warm < *benchSlice/4; {
		*n = max(*n/3, 1)
		warm += timeSlice(b, run, n)
	}
}

// timeSlice returns how long n operations take, and leaves in n how many fill a slice.
func timeSlice(b *testing.B, run benchRun, n *int) time.Duration {
	var clock benchStopwatch
	clock.StartTimer()
	if err := run(&clock, *n); err != nil {
		b.Fatal(err)
	}
	clock.StopTimer()
	grow := float64(*benchSlice) / float64(max(clock.elapsed, 1))
	*n = max(1, int(float64(*n)*min(grow, 100)))
	return clock.elapsed
}

// A benchScope is a part of a benchmark that cleans up at its own end.
type benchScope struct {
	testing.TB
	cleanups []func()
}

func (s *benchScope) Cleanup(f func()) { s.cleanups = append(s.cleanups, f) }

func (s *benchScope) end() {
	for _, f := range slices.Backward(s.cleanups) {
		f()
	}
}

// A benchStopwatch is a clock for runs without a *testing.B of their own.
type benchStopwatch struct {
	started time.Time // zero while stopped
	elapsed time.Duration
}

func (s *benchStopwatch) StartTimer() {
	if s.started.IsZero() {
		s.started = time.Now()
	}
}

func (s *benchStopwatch) StopTimer() {
	if !s.started.IsZero() {
		s.elapsed += time.Since(s.started)
		s.started = time.Time{}
	}
}

// quantile interpolates nothing: the nearest value of the sample serves.
func quantile(sample []float64, q float64) float64 {
	sorted := slices.Sorted(slices.Values(sample))
	return sorted[int(q*float64(len(sorted)-1)+0.5)]
}

// inParallel calls f with 0 to n-1 from workers goroutines, until all is done or
// each has met an error.
func inParallel(n, workers int, f func(i int) error) error {
	var next atomic.Int64
	errs := make(chan error, workers)
	for range workers {
		go func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= n {
					errs <- nil
					return
				}
				if err := f(i); err != nil {
					errs <- err
					return
				}
			}
		}()
	}
	var err error
	for range workers {
		err = errors.Join(err, <-errs)
	}
	return err
}

func sizeName(size int) string {
	switch {
	case size >= 1<<20:
		return fmt.Sprintf("%dMiB", size>>20)
	case size >= 1<<10:
		return fmt.Sprintf("%dKiB", size>>10)
	}
	return fmt.Sprintf("%dB", size)
}
