// Command datagrams runs programs that were written for UDP over rdmanet: a DNS server and
// its client, or with -quic a QUIC server and its client. It checks every answer.
package main

import (
	"context"
	"flag"
	"net"

	"github.com/rdmanet/rdmanet/examples/internal/demo"
)

func main() {
	overQUIC := flag.Bool("quic", false, "QUIC in place of DNS; it takes datagrams of 1280 bytes")
	queries := flag.Uint("queries", 1000, "client of DNS: `number` of queries")
	size := flag.Uint("size", 1<<20, "client of QUIC: `bytes` each way on each of 4 streams")
	demo.Main(demo.Program{
		ServePacket: func(p net.PacketConn) error {
			if *overQUIC {
				return serveQUIC(p)
			}
			return serveDNS(p)
		},
		ClientPacket: func(ctx context.Context, dial demo.DialFunc, listen demo.ListenPacketFunc, addr string) (string, error) {
			if *overQUIC {
				return echoQUIC(ctx, listen, addr, int(*size))
			}
			return queryDNS(ctx, dial, addr, int(*queries))
		},
	})
}
