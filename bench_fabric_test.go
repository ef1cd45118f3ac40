package rdmanet_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"testing"

	"github.com/rdmanet/rdmanet"
	"github.com/rdmanet/rdmanet/internal/fabric"
)

// BenchmarkFabric measures what an operation costs in rdmanet itself, over a device that
// copies the bytes within the process and does nothing else. It makes no system call, by
// construction: neither the device nor rdmanet has any on these paths. The device reports
// that it pins memory, so that rdmanet treats it as an adapter.
//
// With -cpu 1 ns/op is the processor time of both ends together, as nothing runs beside
// them, and the Go scheduler has no other processor to wake. With -cpu 2 the two ends run at
// the same time, and the scheduler's system calls to wake a processor are in ns/op.
//
// posts/op and signaled/op are sums over both ends: the calls that post sends, and the sends
// that ask for a completion. An adapter takes time for each that is not in ns/op.
//
// This file uses the public API only, so that it compiles beside older versions of rdmanet.
func BenchmarkFabric(b *testing.B) {
	b.Run("PingPong/size=64B", func(b *testing.B) { benchFabricPingPong(b, 64) })
	for _, size := range []int{64, 4 << 10, 64 << 10, 1 << 20} { // the last one goes by RDMA Read
		b.Run("Write/size="+fabricSizes[size], func(b *testing.B) { benchFabricWrite(b, size) })
	}
	b.Run("HTTP", benchFabricHTTP)
}

var fabricSizes = map[int]string{64: "64B", 4 << 10: "4KiB", 64 << 10: "64KiB", 1 << 20: "1MiB"}

// fabricWarmUp is the number of operations before the clock starts, in which buffers and
// credits grow to what the load asks for.
const fabricWarmUp = 256

// benchFabricPingPong waits for the answer to each message.
func benchFabricPingPong(b *testing.B, size int) {
	client, server := fabricConns(b)
	go func() {
		buf := make([]byte, size)
		for {
			if _, err := io.ReadFull(server, buf); err != nil {
				return // the connection is closed
			}
			if _, err := server.Write(buf); err != nil {
				return
			}
		}
	}()
	buf := make([]byte, size)
	measureFabric(b, fabricEnds(client, server), func(n int) error {
		for range n {
			if _, err := client.Write(buf); err != nil {
				return err
			}
			if _, err := io.ReadFull(client, buf); err != nil {
				return err
			}
		}
		return nil
	})
}

// benchFabricWrite writes one way, and waits at the end until all was read.
func benchFabricWrite(b *testing.B, size int) {
	client, server := fabricConns(b)
	counts, read := make(chan int), make(chan error)
	go func() {
		buf := make([]byte, max(size, 64<<10))
		for n := range counts {
			var err error
			for left := n * size; left > 0 && err == nil; {
				var k int
				k, err = server.Read(buf[:min(left, len(buf))])
				left -= k
			}
			read <- err
		}
	}()
	defer close(counts)
	buf := make([]byte, size)
	b.SetBytes(int64(size))
	measureFabric(b, fabricEnds(client, server), func(n int) error {
		counts <- n
		for range n {
			if _, err := client.Write(buf); err != nil {
				return err
			}
		}
		return <-read
	})
}

// benchFabricHTTP sends keep-alive requests, one at a time, with 128 bytes in the answer.
func benchFabricHTTP(b *testing.B) {
	cfg := fabricConfig()
	ln := fabricListen(b, cfg)
	var mu sync.Mutex
	var ends []*rdmanet.Conn
	add := func(c net.Conn) {
		mu.Lock()
		defer mu.Unlock()
		ends = append(ends, c.(*rdmanet.Conn))
	}
	body := make([]byte, 128)
	server := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Write(body) }),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			add(c)
			return ctx
		},
	}
	go server.Serve(ln)
	b.Cleanup(func() { server.Close() })
	transport := &http.Transport{
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := (&rdmanet.Dialer{Config: cfg}).DialContext(ctx, network, addr)
			if err == nil {
				add(c)
			}
			return c, err
		},
		MaxConnsPerHost: 1,
	}
	b.Cleanup(transport.CloseIdleConnections)
	client := &http.Client{Transport: transport}
	url := "http://" + ln.Addr().String()
	measureFabric(b, func() []*rdmanet.Conn {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(ends)
	}, func(n int) error {
		for range n {
			resp, err := client.Get(url)
			if err != nil {
				return err
			}
			_, err = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// measureFabric times b.N operations of run, and counts what the ends have done meanwhile.
func measureFabric(b *testing.B, ends func() []*rdmanet.Conn, run func(n int) error) {
	b.Helper()
	if err := run(fabricWarmUp); err != nil {
		b.Fatal(err)
	}
	count := func() (posts, signaled uint64) {
		for _, c := range ends() {
			s := c.Stats()
			posts += s.Posts
			signaled += s.Signaled
		}
		return posts, signaled
	}
	posts, signaled := count()
	b.ReportAllocs()
	b.ResetTimer()
	if err := run(b.N); err != nil {
		b.Fatal(err)
	}
	b.StopTimer()
	postsAfter, signaledAfter := count()
	b.ReportMetric(float64(postsAfter-posts)/float64(b.N), "posts/op")
	b.ReportMetric(float64(signaledAfter-signaled)/float64(b.N), "signaled/op")
}

func fabricEnds(ends ...*rdmanet.Conn) func() []*rdmanet.Conn {
	return func() []*rdmanet.Conn { return ends }
}

// fabricConfig returns a Config for a device that nobody else uses.
func fabricConfig() rdmanet.Config {
	f := fabric.New(4096, netip.MustParseAddr("127.0.0.1"))
	f.PinMemory()
	return rdmanet.Config{Provider: f}
}

func fabricListen(b *testing.B, cfg rdmanet.Config) net.Listener {
	b.Helper()
	ln, err := (&rdmanet.ListenConfig{Config: cfg}).Listen(context.Background(), "rdma4", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { ln.Close() })
	return ln
}

// fabricConns returns the two ends of a connection, which are closed with the benchmark.
func fabricConns(b *testing.B) (client, server *rdmanet.Conn) {
	b.Helper()
	cfg := fabricConfig()
	ln := fabricListen(b, cfg)
	accepted := make(chan net.Conn, 1)
	go func() {
		c, err := ln.Accept()
		if err != nil {
			b.Error(err)
		}
		accepted <- c
	}()
	c, err := (&rdmanet.Dialer{Config: cfg}).Dial("rdma4", ln.Addr().String())
	if err != nil {
		ln.Close() // which ends Accept
		b.Fatal(err)
	}
	s := <-accepted
	b.Cleanup(func() {
		c.Close()
		s.Close()
	})
	return c.(*rdmanet.Conn), s.(*rdmanet.Conn)
}
