// Command grpc makes unary calls, a server stream and a bidirectional stream,
// and checks every answer.
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"time"

	"github.com/rdmanet/rdmanet/examples/internal/demo"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

func main() {
	calls := flag.Uint("calls", 1000, "client: `number` of unary calls, and of messages on each stream")
	demo.Main(demo.Program{
		Serve: serve,
		Client: func(ctx context.Context, dial demo.DialFunc, addr string) (string, error) {
			return callAll(ctx, dial, addr, int(*calls))
		},
	})
}

// serve hands the listener to gRPC.
func serve(ln net.Listener) error {
	srv := grpc.NewServer()
	srv.RegisterService(&desc, nil)
	demo.Ready(ln.Addr().String())
	return srv.Serve(ln)
}

// callAll hands the dialer to gRPC and calls each method.
func callAll(ctx context.Context, dial demo.DialFunc, addr string, n int) (string, error) {
	cc, err := grpc.NewClient("passthrough:///"+addr,
		grpc.WithContextDialer(dial),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return "", err
	}
	defer cc.Close()

	for _, part := range []struct {
		name string
		call func() error
	}{
		{"unary calls", func() error { return callUpper(ctx, cc, n) }},
		{"messages on a server stream", func() error { return callCount(ctx, cc, uint32(n)) }},
		{"messages each way on a bidirectional stream", func() error { return callSum(ctx, cc, uint32(n)) }},
	} {
		start := time.Now()
		if err := part.call(); err != nil {
			return "", err
		}
		took := time.Since(start)
		fmt.Printf("%d %s in %v, %.0f a second\n", n, part.name, took.Round(time.Millisecond), float64(n)/took.Seconds())
	}
	return "every answer as it should be", nil
}
