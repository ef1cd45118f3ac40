package main

import (
	"context"
	"net"
	"strings"
	"testing"

	"github.com/rdmanet/rdmanet"
	"github.com/rdmanet/rdmanet/examples/internal/demo/demotest"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

func TestMain(m *testing.M) { demotest.Main(m, main) }

func dial(ctx context.Context, addr string) (net.Conn, error) {
	return rdmanet.DialContext(ctx, "rdma", addr)
}

func TestCallAll(t *testing.T) {
	if _, err := callAll(t.Context(), dial, demotest.Serve(t, serve), 200); err != nil {
		t.Error(err)
	}
}

func TestErrorReachesClient(t *testing.T) {
	cc, err := grpc.NewClient("passthrough:///"+demotest.Serve(t, serve),
		grpc.WithContextDialer(dial),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	err = cc.Invoke(t.Context(), methodUpper, wrapperspb.String(""), new(text))
	if status.Code(err) != codes.InvalidArgument {
		t.Errorf("got %v, want code InvalidArgument", err)
	}
}

func TestTwoProcesses(t *testing.T) {
	for _, network := range []string{"rdma", "tcp"} {
		t.Run(network, func(t *testing.T) {
			out, err := demotest.Run(t, "-network", network, "-calls=50")
			if err != nil || !strings.Contains(out, "ok: every answer as it should be\n") {
				t.Errorf("%v, printed:\n%s", err, out)
			}
		})
	}
}

func TestMainFails(t *testing.T) {
	out, err := demotest.Run(t, "-calls=-1")
	if err == nil || !strings.Contains(out, "usage: ") {
		t.Errorf("%v, printed:\n%s", err, out)
	}
}
