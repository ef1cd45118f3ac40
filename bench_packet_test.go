package rdmanet_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/rpc"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rdmanet/rdmanet"
)

// The yardsticks of datagrams: ib_send_bw over UD queue pairs, and UDP sockets on the
// same address.

const yardPackets = 20000

var (
	yardRate64     = &yardstick{"rdmanet", "a second", packetRate("rdmanet", 64)}
	yardBatch64    = &yardstick{"rdmanet", "a second", batchRate(64)}
	yardSendRate64 = &yardstick{"`ib_send_bw -c UD -e`", "a second", perftestRate(64)}
	yardUDPRate64  = &yardstick{"UDP", "a second", packetRate("udp", 64)}

	yardRate1K     = &yardstick{"rdmanet", "a second", packetRate("rdmanet", 1<<10)}
	yardBatch1K    = &yardstick{"rdmanet", "a second", batchRate(1 << 10)}
	yardSendRate1K = &yardstick{"`ib_send_bw -c UD -e`", "a second", perftestRate(1 << 10)}
	yardUDPRate1K  = &yardstick{"UDP", "a second", packetRate("udp", 1<<10)}

	yardTrip    = &yardstick{"rdmanet", "µs", packetTrip("rdmanet", 0)}
	yardUDPTrip = &yardstick{"UDP", "µs", packetTrip("udp", 0)}
	yardUDLat   = &yardstick{"`ib_send_lat -c UD -e`", "µs", perftest("ib_send_lat", 4, yardPingSize, yardPingCount, "-c", "UD", "-e", "-t", "2000", "-r", "2000")}

	yardSleepTrip = &yardstick{"rdmanet that never polls", "µs", packetTrip("rdmanet", -1)}

	yardPollTrip = &yardstick{"rdmanet with BusyPoll", "µs", packetTrip("rdmanet", yardBusyPoll)}

	packetYardsticks = []*yardstick{yardRate64, yardBatch64, yardSendRate64, yardUDPRate64, yardRate1K, yardBatch1K, yardSendRate1K, yardUDPRate1K, yardTrip, yardUDPTrip, yardUDLat, yardSleepTrip, yardPollTrip}
)

var packetYardGroups = []yardGroup{
	{"datagrams of 64 B a second", []yardRow{
		{yardRate64, yardSendRate64},
		{yardRate64, yardUDPRate64},
	}},
	{"datagrams of 64 B a second, in batches of 32", []yardRow{{yardBatch64, yardSendRate64}}},
	{"datagrams of 1 KiB a second", []yardRow{
		{yardRate1K, yardSendRate1K},
		{yardRate1K, yardUDPRate1K},
	}},
	{"datagrams of 1 KiB a second, in batches of 32", []yardRow{{yardBatch1K, yardSendRate1K}}},
	{"64 B datagram one way, µs", []yardRow{
		{yardTrip, yardUDPTrip},
		{yardTrip, yardUDLat},
	}},
	{"64 B datagram one way, without polling, µs", []yardRow{{yardSleepTrip, yardUDPTrip}}},
	{"64 B datagram one way, BusyPoll, µs", []yardRow{{yardPollTrip, yardUDPTrip}}},
}

// BenchmarkPacketYardsticks is BenchmarkYardsticks for datagrams, on a device that has
// them. What counts of a sender is what arrives. The table goes to datagrams.md.
func BenchmarkPacketYardsticks(b *testing.B) {
	if dev := os.Getenv("RDMANET_VM_DEVICE"); strings.HasPrefix(dev, "siw") {
		b.Skip("siw has no datagrams: vm/bench runs this on rxe")
	}
	runYardsticks(b, packetYardsticks, packetYardGroups, "datagrams.md")
}

// perftestRate returns messages a second, which ib_send_bw counts in millions.
func perftestRate(size int) yardFunc {
	bw := perftest("ib_send_bw", 4, size, yardPackets, "-c", "UD", "-e")
	return func(tb testing.TB, addr string) (float64, error) {
		v, err := bw(tb, addr)
		return v * 1e6, err
	}
}

// listenPacket opens a PacketConn of a transport, "udp" or "rdmanet".
func (s BenchService) listenPacket() (net.PacketConn, error) {
	address := "127.0.0.1:0"
	if host := os.Getenv("RDMANET_VM_ADDR"); host != "" {
		address = net.JoinHostPort(host, "0")
	}
	if s.Transport == "udp" {
		return net.ListenPacket("udp", address)
	}
	var lc rdmanet.ListenConfig
	lc.Config.BusyPoll = *benchBusyPoll
	return lc.ListenPacket(context.Background(), "udp", address)
}

// packetReader is what both transports have to read without garbage.
type packetReader interface {
	ReadFromUDPAddrPort([]byte) (int, netip.AddrPort, error)
	WriteToUDPAddrPort([]byte, netip.AddrPort) (int, error)
}

// PacketCount is what arrived. It is exported for net/rpc.
type PacketCount struct {
	Count int
	Took  time.Duration // from the first to the last
}

// packetSink counts what arrives.
type packetSink struct {
	mu          sync.Mutex
	first, last time.Time
	count       int
}

func (s *packetSink) add(n int) {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.count == 0 {
		s.first = now
	}
	s.last = now
	s.count += n
}

// ListenPacket starts a service of datagrams: "echo", or "sink" and "batch sink", of which
// PacketsReceived tells.
func (f *benchFarEnd) ListenPacket(s BenchService, addr *string) error {
	p, err := s.listenPacket()
	if err != nil {
		return err
	}
	batch := newBatch(4096)
	var wg sync.WaitGroup
	wg.Go(func() {
		r, buf := p.(packetReader), make([]byte, 4096)
		for s.Name == "batch sink" {
			n, err := p.(*rdmanet.PacketConn).ReadBatch(batch)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			f.sink.add(n)
		}
		for {
			n, from, err := r.ReadFromUDPAddrPort(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if s.Name == "echo" {
				r.WriteToUDPAddrPort(buf[:n], from)
			} else {
				f.sink.add(1)
			}
		}
	})
	*addr = p.LocalAddr().String()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.close[*addr] = func() {
		p.Close()
		wg.Wait()
	}
	return nil
}

// PacketsReceived tells how many datagrams have arrived since it was asked last.
func (f *benchFarEnd) PacketsReceived(_ struct{}, c *PacketCount) error {
	f.sink.mu.Lock()
	defer f.sink.mu.Unlock()
	*c = PacketCount{f.sink.count, f.sink.last.Sub(f.sink.first)}
	f.sink.count = 0
	return nil
}

// packetMeasure measures on a connected PacketConn, whose peer is in a fresh process.
func packetMeasure(s BenchService, busyPoll time.Duration, measure func(c net.Conn, peer *rpc.Client) (float64, error)) yardFunc {
	return func(tb testing.TB, _ string) (float64, error) {
		defer func(d time.Duration) { *benchBusyPoll = d }(*benchBusyPoll)
		*benchBusyPoll = busyPoll
		scope := &benchScope{TB: tb}
		defer scope.end()
		peer := startBenchPeer(scope, 2)
		var addr string
		if err := peer.Call("FarEnd.ListenPacket", s, &addr); err != nil {
			return 0, err
		}
		scope.Cleanup(func() { peer.Call("FarEnd.Close", addr, new(struct{})) })
		dial := (&rdmanet.Dialer{Config: rdmanet.Config{BusyPoll: busyPoll}}).Dial
		if s.Transport == "udp" {
			dial = net.Dial
		}
		c, err := dial("udp", addr)
		if err != nil {
			return 0, err
		}
		defer c.Close()
		return measure(c, peer)
	}
}

// newBatch is 32 datagrams of size bytes.
func newBatch(size int) []rdmanet.Datagram {
	batch := make([]rdmanet.Datagram, 32)
	for i := range batch {
		batch[i].Buf = make([]byte, size)
	}
	return batch
}

// packetRate writes as fast as it goes and returns how many a second have arrived.
func packetRate(transport string, size int) yardFunc {
	return arrivalRate(BenchService{Transport: transport, Name: "sink"}, func(c net.Conn, count int) (err error) {
		buf := make([]byte, size)
		for i := 0; i < count && err == nil; i++ {
			_, err = c.Write(buf)
		}
		return err
	})
}

// batchRate is packetRate by WriteBatch and ReadBatch.
func batchRate(size int) yardFunc {
	return arrivalRate(BenchService{Transport: "rdmanet", Name: "batch sink"}, func(c net.Conn, count int) (err error) {
		batch := newBatch(size)
		for n := 0; n < count && err == nil; n += len(batch) {
			_, err = c.(*rdmanet.PacketConn).WriteBatch(batch[:min(len(batch), count-n)])
		}
		return err
	})
}

// arrivalRate has datagrams written and returns how many a second have arrived.
func arrivalRate(s BenchService, write func(c net.Conn, count int) error) yardFunc {
	return packetMeasure(s, 0, func(c net.Conn, peer *rpc.Client) (float64, error) {
		var got PacketCount
		for _, count := range []int{yardPackets / 10, yardPackets} { // the first to warm up
			if err := write(c, count); err != nil {
				return 0, err
			}
			time.Sleep(100 * time.Millisecond) // for the last to arrive
			if err := peer.Call("FarEnd.PacketsReceived", struct{}{}, &got); err != nil {
				return 0, err
			}
		}
		fmt.Fprintf(os.Stderr, "%s: %d of %d datagrams arrived\n", s.Transport, got.Count, yardPackets)
		return float64(got.Count) / got.Took.Seconds(), nil
	})
}

// packetTrip makes round trips and returns half of the median one. What is lost does not
// count.
func packetTrip(transport string, busyPoll time.Duration) yardFunc {
	return packetMeasure(BenchService{Transport: transport, Name: "echo"}, busyPoll, func(c net.Conn, _ *rpc.Client) (float64, error) {
		buf := make([]byte, yardPingSize)
		var trips []float64
		for len(trips) < yardPingCount {
			start := time.Now()
			if _, err := c.Write(buf); err != nil {
				return 0, err
			}
			if err := c.SetReadDeadline(start.Add(yardPatience)); err != nil {
				return 0, err
			}
			if _, err := c.Read(buf); err != nil {
				return 0, err
			}
			trips = append(trips, time.Since(start).Seconds()*1e6)
		}
		return quantile(trips, 0.5) / 2, nil
	})
}
