package main

import (
	"context"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/rdmanet/rdmanet"
	"github.com/rdmanet/rdmanet/examples/internal/demo/demotest"
)

func TestMain(m *testing.M) { demotest.Main(m, main) }

func dial(ctx context.Context, addr string) (net.Conn, error) {
	return rdmanet.DialContext(ctx, "udp", addr)
}

func listen(context.Context) (net.PacketConn, error) {
	return rdmanet.ListenPacket("udp", "127.0.0.1:0")
}

func TestDNS(t *testing.T) {
	addr := demotest.ServePacket(t, serveDNS)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if _, err := queryDNS(t.Context(), dial, addr, 100); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// A client over rdmanet works with a server that uses sockets of package net, and the other
// way round.
func TestDNSWithUDP(t *testing.T) {
	p, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- serveDNS(p) }()
	if _, err := queryDNS(t.Context(), dial, p.LocalAddr().String(), 20); err != nil {
		t.Error(err)
	}
	p.Close()
	<-done
	plain := func(ctx context.Context, addr string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "udp", addr)
	}
	if _, err := queryDNS(t.Context(), plain, demotest.ServePacket(t, serveDNS), 20); err != nil {
		t.Error(err)
	}
}

func TestQUIC(t *testing.T) {
	addr := demotest.ServePacket(t, serveQUIC)
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			_, err := echoQUIC(t.Context(), listen, addr, 200<<10)
			demotest.NoError(t, err)
		})
	}
	wg.Wait()
}

func TestTwoProcesses(t *testing.T) {
	for _, network := range []string{"rdma", "udp"} {
		for name, args := range map[string][]string{
			"every answer as it should be": {"-queries=50"},
			"every byte came back":         {"-quic", "-size=100000"},
		} {
			out, err := demotest.Run(t, append(args, "-network", network)...)
			if err != nil || !strings.Contains(out, "ok: "+name+"\n") {
				t.Errorf("%s: %v, printed:\n%s", network, err, out)
			}
		}
	}
}

func TestMainFails(t *testing.T) {
	for _, args := range [][]string{{"-queries=-1"}, {"-quic", "-size=-1"}, {"-network=tcp"}} {
		out, err := demotest.Run(t, args...)
		if err == nil || strings.Contains(out, "listening") || strings.Contains(out, "panic:") {
			t.Errorf("%v: %v, printed:\n%s", args, err, out)
		}
	}
}
