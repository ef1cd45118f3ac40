package rdmanet_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net"
	"net/rpc"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"testing"
	"time"

	"github.com/rdmanet/rdmanet/internal/defect"
)

var (
	idleCount = flag.Int("idle", 10000, "connections of BenchmarkIdleConns")
	idleBytes = flag.Int64("idlebytes", 8<<20, "bytes that each connection of BenchmarkIdleAfterBulk moves each way before it idles")
	idleGrow  = flag.Float64("idlegrowth", 1.2, "how many times what a fresh connection takes one may take in BenchmarkIdleAfterBulk")
	idleWait  = flag.Duration("idlewait", 7*time.Second, "how long they idle before memory is measured; rdmanet gives memory back after 5s")
)

// idleMessage is the size of an echo on an idle connection.
const idleMessage = 64

// BenchmarkIdleConns opens many connections between two fresh processes, echoes
// once on each, lets them idle, and echoes once more. The far end has a
// goroutine blocked in Read on each; this end has one too, or none. It reports
//
//	B/connend     growth of the resident memory of both processes, by connection end
//	anon-B/conn   growth of the anonymous part of it, by connection: of both ends together
//	shmem-B/conn  growth of the shared memory of the system (Shmem of /proc/meminfo), by connection
//	dials/s       rate of the dials alone
//	conns/s       rate of the dials with the first echo on each connection
//	wakes/s       rate of the echoes after the idle time
//	ratio         dials/s of rdmanet to those of TCP
//
// Memory of the kernel is not in it, neither TCP's nor a device's. Shared memory is resident in
// both processes, so B/connend has it twice where anon-B/conn and shmem-B/conn together have it
// once. Other programs of the system may change shmem-B/conn. With shared memory a connection
// takes more than one file descriptor, so there are fewer connections where the limit of a process
// is too low for all.
func BenchmarkIdleConns(b *testing.B) {
	for _, reading := range []bool{true, false} {
		var firstRate float64
		transports := usualTransports()
		for i, transport := range transports {
			b.Run(fmt.Sprintf("reading=%t/transport=%s", reading, transport), func(b *testing.B) {
				if runtime.GOOS != "linux" {
					b.Skip("resident memory is read from /proc: run it on Linux")
				}
				var rate float64
				for b.Loop() {
					rate = benchmarkIdle(b, transport, reading)
				}
				b.ReportMetric(0, "ns/op") // not shown: the idle time is in it
				if i == 0 {
					firstRate = rate
				} else if firstRate > 0 {
					b.ReportMetric(rate/firstRate, ratioName(transport))
				}
			})
		}
	}
}

// idleBound is what an end may take that has moved much and idles, in bytes.
const idleBound = 24 << 10

// BenchmarkIdleAfterBulk is BenchmarkIdleConns with connections that each move -idlebytes
// both ways before they idle, for 10 s. It does so with the TCP link of the software device,
// and with shared memory. With the TCP link it fails where an end takes more than idleBound, or than -idlegrowth times what one takes that has moved
// nothing. With RDMANET_HUGE_PAGES=1 the system is asked for huge pages for all memory that
// rdmanet maps, before the library says that it wants none. vm/tests/huge-pages runs it
// where transparent_hugepage is "always".
func BenchmarkIdleAfterBulk(b *testing.B) {
	if runtime.GOOS != "linux" {
		b.Skip("resident memory is read from /proc: run it on Linux")
	}
	fresh := math.Inf(1)
	for _, bytes := range []int64{0, *idleBytes} {
		b.Run(fmt.Sprintf("bytes=%d", bytes), func(b *testing.B) {
			for b.Loop() {
				taken := measureIdle(b, "rdmanet", true, bytes, 10*time.Second).taken
				if most := min(idleBound, *idleGrow*fresh); taken > most && os.Getenv("RDMANET_VM_ADDR") == "" {
					b.Errorf("an idle end takes %.0f bytes, more than %.0f", taken, most)
				}
				if bytes == 0 {
					fresh = taken
				}
			}
			b.ReportMetric(0, "ns/op")
		})
	}
	if !benchHasShared() {
		return
	}
	for _, bytes := range []int64{0, *idleBytes} {
		b.Run(fmt.Sprintf("bytes=%d/transport=shared", bytes), func(b *testing.B) {
			for b.Loop() {
				measureIdle(b, "shared", true, bytes, 10*time.Second)
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

// benchmarkIdle returns the rate of the dials, a second.
func benchmarkIdle(b *testing.B, transport string, reading bool) float64 {
	return measureIdle(b, transport, reading, 0, *idleWait).rate
}

// idleMeasure is what measureIdle has found.
type idleMeasure struct{ rate, taken float64 }

func measureIdle(b *testing.B, transport string, reading bool, bytes int64, wait time.Duration) idleMeasure {
	scope := &benchScope{TB: b}
	defer scope.end()
	near, far := startBenchPeer(scope, 2), startBenchPeer(scope, 2)
	n := *idleCount
	for _, end := range []*rpc.Client{near, far} {
		var limit int
		callBench(b, end, "FileLimit", struct{}{}, &limit)
		if most := (limit - 100) / idleFiles; n > most && (transport == "shared" || transport == "on") {
			b.Logf("%d connections in place of %d: the limit of file descriptors is %d (ulimit -Hn)", most, n, limit)
			n = most
		}
		if need := n + 100; limit < need {
			b.Fatalf("%d connections take %d file descriptors a process, the limit is %d (ulimit -Hn)", n, need, limit)
		}
	}
	before := idleMemoryOf(b, near, far)

	target := listenBench(scope, far, BenchService{Transport: transport, Name: "burst", Size: idleMessage})
	scope.Cleanup(func() { near.Call("FarEnd.CloseIdle", struct{}{}, new(struct{})) }) // far waits for it
	var dialed, echoed, woken time.Duration
	callBench(b, near, "DialIdle", IdleDial{target.transport, target.addr, n, reading, bytes}, &dialed)
	callBench(b, near, "EchoIdle", struct{}{}, &echoed)
	time.Sleep(wait)
	after := idleMemoryOf(b, near, far)
	grown := after.resident - before.resident
	callBench(b, near, "EchoIdle", struct{}{}, &woken)
	callBench(b, near, "CloseIdle", struct{}{}, new(struct{}))

	rate := float64(n) / dialed.Seconds()
	b.ReportMetric(float64(grown)/float64(2*n), "B/connend")
	b.ReportMetric(float64(after.anonymous-before.anonymous)/float64(n), "anon-B/conn")
	b.ReportMetric(float64(after.shared-before.shared)/float64(n), "shmem-B/conn")
	b.ReportMetric(rate, "dials/s")
	b.ReportMetric(float64(n)/(dialed+echoed).Seconds(), "conns/s")
	b.ReportMetric(float64(n)/woken.Seconds(), "wakes/s")
	return idleMeasure{rate, float64(grown) / float64(2*n)}
}

// idleFiles is how many file descriptors a process has for a connection that uses shared memory.
const idleFiles = 4

// idleMemory is memory in bytes: of both processes together, and the shared memory of the
// system.
type idleMemory struct{ resident, anonymous, shared int64 }

func idleMemoryOf(tb testing.TB, ends ...*rpc.Client) (m idleMemory) {
	for _, end := range ends {
		var p BenchMemory
		callBench(tb, end, "Memory", struct{}{}, &p)
		m.resident += p.Resident
		m.anonymous += p.Anonymous
	}
	kib, err := procField("/proc/meminfo", "Shmem:")
	if err != nil {
		tb.Fatal(err)
	}
	m.shared = kib << 10
	return m
}

func callBench(tb testing.TB, end *rpc.Client, method string, args, reply any) {
	if err := end.Call("FarEnd."+method, args, reply); err != nil {
		tb.Fatalf("%s: %v", method, err)
	}
}

// idleConns are the connections of the dialling process.
type idleConns struct {
	conns   []net.Conn
	reading bool       // each has a goroutine that reads into answers
	answers chan error // one for each echo: nil, or why it failed
}

// IdleDial are the arguments of DialIdle.
type IdleDial struct {
	Transport, Addr string
	N               int
	Reading         bool
	Bytes           int64 // that each connection moves
}

// idleWorkers is how many dials or echoes are under way at a time.
const idleWorkers = 16

// DialIdle opens the connections and tells how long it took.
func (f *benchFarEnd) DialIdle(a IdleDial, took *time.Duration) error {
	idle := &idleConns{make([]net.Conn, a.N), a.Reading, make(chan error, idleWorkers)}
	f.mu.Lock()
	f.idle = idle
	f.mu.Unlock()
	target := benchTarget{transport: a.Transport, addr: a.Addr}
	start := time.Now()
	err := inParallel(a.N, idleWorkers, func(i int) (err error) {
		if idle.conns[i], err = target.dial(); err != nil {
			return err
		}
		if a.Bytes > 0 {
			err = idle.burst(i, a.Bytes)
		}
		if a.Reading {
			go idle.read(i)
		}
		return err
	})
	*took = time.Since(start)
	return err
}

// EchoIdle echoes once on each connection and tells how long it took.
func (f *benchFarEnd) EchoIdle(_ struct{}, took *time.Duration) error {
	idle := f.idleConns()
	start := time.Now()
	go inParallel(len(idle.conns), idleWorkers, func(i int) error {
		if _, err := idle.conns[i].Write(idlePayload(i)); err != nil {
			idle.answers <- err
		} else if !idle.reading {
			idle.answers <- idle.answer(i, make([]byte, idleMessage))
		}
		return nil
	})
	var errs []error
	for range idle.conns {
		if err := <-idle.answers; err != nil && len(errs) < 3 {
			errs = append(errs, err)
		}
	}
	*took = time.Since(start)
	return errors.Join(errs...)
}

// CloseIdle closes the connections that are open.
func (f *benchFarEnd) CloseIdle(struct{}, *struct{}) error {
	f.mu.Lock()
	idle := f.idle
	f.idle = nil
	f.mu.Unlock()
	if idle == nil {
		return nil
	}
	return inParallel(len(idle.conns), idleWorkers, func(i int) error {
		if idle.conns[i] == nil {
			return nil
		}
		return idle.conns[i].Close()
	})
}

func (f *benchFarEnd) idleConns() *idleConns {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.idle
}

// burst moves n bytes each way on connection i.
func (idle *idleConns) burst(i int, n int64) error {
	c := idle.conns[i]
	head := make([]byte, idleMessage)
	binary.BigEndian.PutUint64(head, uint64(n))
	if _, err := c.Write(head); err != nil {
		return err
	}
	if err := errors.Join(giveBurst(c, n), takeBurst(c, n)); err != nil {
		return err
	}
	_, err := io.ReadFull(c, head)
	return err
}

// Bursts are read into memory of a pool and written from one array. Both are small, as Go's
// heap stays with the process as long as the collector's goal has room for it.
var (
	bursts = sync.Pool{New: func() any { return new([64 << 10]byte) }}
	burst  [256 << 10]byte
)

// takeBurst reads n bytes and drops them.
func takeBurst(c net.Conn, n int64) error {
	if n == 0 {
		return nil
	}
	buf := bursts.Get().(*[64 << 10]byte)
	defer bursts.Put(buf)
	for n > 0 {
		k, err := c.Read(buf[:min(n, int64(len(buf)))])
		if err != nil {
			return err
		}
		n -= int64(k)
	}
	return nil
}

// giveBurst writes n bytes.
func giveBurst(c net.Conn, n int64) error {
	for n > 0 {
		k, err := c.Write(burst[:min(n, int64(len(burst)))])
		if err != nil {
			return err
		}
		n -= int64(k)
	}
	return nil
}

// read reports every answer on connection i until it is closed.
func (idle *idleConns) read(i int) {
	buf := make([]byte, idleMessage)
	for {
		err := idle.answer(i, buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		idle.answers <- err
		if err != nil {
			return
		}
	}
}

// answer takes the answer on connection i, which must be what was sent there.
func (idle *idleConns) answer(i int, buf []byte) error {
	if _, err := io.ReadFull(idle.conns[i], buf); err != nil {
		return err
	}
	return defect.Differ(idlePayload(i), buf)
}

// idlePayload is what is sent on connection i.
func idlePayload(i int) []byte {
	return binary.BigEndian.AppendUint64(make([]byte, idleMessage-8, idleMessage), uint64(i))
}

// BenchMemory is the resident memory of a process, and the anonymous part of it, in bytes.
type BenchMemory struct{ Resident, Anonymous int64 }

// Memory gives free memory back to the system and returns what is left.
func (f *benchFarEnd) Memory(_ struct{}, m *BenchMemory) error {
	debug.FreeOSMemory() // collects garbage first
	debug.FreeOSMemory() // and now what pools had kept
	resident, err := procField("/proc/self/status", "VmRSS:")
	if err != nil {
		return err
	}
	anonymous, err := procField("/proc/self/status", "RssAnon:")
	*m = BenchMemory{resident << 10, anonymous << 10}
	return err
}

// FileLimit returns how many files the process may have open. The Go runtime
// has raised the soft limit to the hard one.
func (f *benchFarEnd) FileLimit(_ struct{}, n *int) error {
	limit, err := procField("/proc/self/limits", "Max open files")
	*n = int(limit)
	return err
}

// procField returns the first number after name in a file of /proc.
func procField(file, name string) (n int64, err error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	_, rest, _ := bytes.Cut(data, []byte(name))
	if _, err := fmt.Sscan(string(rest), &n); err != nil {
		return 0, fmt.Errorf("%s: %s: %w", file, name, err)
	}
	return n, nil
}

// TestIdleConns wakes connections that have idled, with and without a blocked
// Read at this end.
func TestIdleConns(t *testing.T) {
	for _, reading := range []bool{true, false} {
		for _, transport := range usualTransports() {
			t.Run(fmt.Sprintf("reading=%t/%s", reading, transport), func(t *testing.T) {
				end := startBenchPeer(t, 1)
				target := listenBench(t, end, BenchService{Transport: transport, Name: "burst", Size: idleMessage})
				callBench(t, end, "DialIdle", IdleDial{target.transport, target.addr, 50, reading, 1 << 20}, new(time.Duration))
				callBench(t, end, "EchoIdle", struct{}{}, new(time.Duration))
				callBench(t, end, "EchoIdle", struct{}{}, new(time.Duration))
				callBench(t, end, "CloseIdle", struct{}{}, new(struct{}))
			})
		}
	}
}
