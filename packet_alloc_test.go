package rdmanet

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv/iwarp"
)

// packetNets are the devices without a switch in front, which would allocate.
func packetNets(t testing.TB) []packetNet {
	fab := newFabric()
	nets := []packetNet{
		{name: "udp", network: "udp4", address: "127.0.0.1:0", cfg: Config{Provider: iwarp.New(iwarp.Config{})}},
		{name: "fabric", network: "udp4", address: "127.0.0.1:0", cfg: Config{Provider: fab}, fabric: fab},
	}
	if hasUD(t) {
		nets = append(nets, packetNet{name: "rdma", network: "udp4", address: local4})
	}
	return nets
}

// A datagram each way costs no allocation.
func TestPacketsWithoutGarbage(t *testing.T) {
	for _, pn := range packetNets(t) {
		for _, size := range []int{0, 64, 1000} {
			client, server := pn.pair(t)
			msg, b := make([]byte, size), make([]byte, 2000)
			client.SetReadDeadline(time.Now().Add(patience))
			server.SetReadDeadline(time.Now().Add(patience))
			turn := func() {
				if _, err := client.Write(msg); err != nil {
					t.Fatal(err)
				}
				_, from, err := server.ReadFromUDPAddrPort(b)
				if err == nil {
					_, err = server.WriteToUDPAddrPort(msg, from)
				}
				if err == nil {
					_, err = client.Read(b)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			for range 300 {
				turn()
			}
			require.Zero(t, testing.AllocsPerRun(heavy(2000), turn), "%s, %d bytes", pn.name, size)
		}
	}
}

func BenchmarkPacketRoundTrip(b *testing.B) {
	for _, pn := range packetNets(b) {
		b.Run(pn.name, func(b *testing.B) {
			client, server := pn.pair(b)
			go func() {
				buf := make([]byte, 100)
				for {
					n, from, err := server.ReadFromUDPAddrPort(buf)
					if err != nil {
						return
					}
					server.WriteToUDPAddrPort(buf[:n], from)
				}
			}()
			b.ReportAllocs()
			buf := make([]byte, 64)
			for b.Loop() {
				if _, err := client.Write(buf); err != nil {
					b.Fatal(err)
				}
				if _, err := client.Read(buf); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkPacketSend writes as fast as it goes to a peer that reads; what is lost is
// reported.
func BenchmarkPacketSend(b *testing.B) {
	for _, pn := range packetNets(b) {
		for _, size := range []int{64, 1000} {
			b.Run(pn.name+"/"+map[int]string{64: "64B", 1000: "1000B"}[size], func(b *testing.B) {
				client, server := pn.pair(b)
				done := make(chan struct{})
				go func() {
					defer close(done)
					buf := make([]byte, 2000)
					for {
						if _, _, err := server.ReadFromUDPAddrPort(buf); err != nil {
							return
						}
					}
				}()
				b.ReportAllocs()
				b.SetBytes(int64(size))
				before := server.Stats().DatagramsReceived
				msg := make([]byte, size)
				for b.Loop() {
					if _, err := client.Write(msg); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(server.Stats().DatagramsReceived-before)/float64(b.N), "received/op")
				server.Close()
				<-done
			})
		}
	}
}
